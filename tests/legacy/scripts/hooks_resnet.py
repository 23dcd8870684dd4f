# SPDX-License-Identifier: Apache-2.0
# The second sample of the torch_npu.hooks guide with a label that is one; torchvision is the stand-in beside this file.
import copy

import torch
import torch.nn as nn
from torch_npu.hooks import register_acc_cmp_hook, seed_all, set_dump_path
from torch_npu.hooks.tools import compare
from torchvision import models

model_cpu = models.resnet50()
model_cpu.eval()
model_npu = copy.deepcopy(model_cpu)
model_npu.eval()

register_acc_cmp_hook(model_cpu)
register_acc_cmp_hook(model_npu)
seed_all()

inputs = torch.randn(1, 3, 244, 244)
labels = torch.randint(0, 10, (1,))
criterion = nn.CrossEntropyLoss()

set_dump_path("./cpu_resnet50_op.pkl")
output = model_cpu(inputs)
loss = criterion(output, labels)
loss.backward()

set_dump_path("./npu_resnet50_op.pkl")
model_npu.npu()
inputs = inputs.npu()
labels = labels.npu()
output = model_npu(inputs)
loss = criterion(output, labels)
loss.backward()

compare("./npu_resnet50_op.pkl", "./cpu_resnet50_op.pkl", "./resnet50_result.csv")
