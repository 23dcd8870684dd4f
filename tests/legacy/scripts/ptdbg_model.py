# SPDX-License-Identifier: Apache-2.0
"""Train as around the guide's snippets: a model on the device `npu`, and one step of it."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ulpscope.testing import npu

npu.install(stand_in_torch_npu=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 2)
        self.conv2 = nn.Conv2d(2, 2, 2)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        x = torch.relu(self.conv1(x.abs())).permute(0, 2, 3, 1)
        x = torch.relu(x.permute(0, 3, 1, 2).abs()).transpose(1, 2).transpose(1, 2)
        x = torch.relu(self.norm(self.conv2(x))).transpose(2, 3).transpose(2, 3)
        return F.relu(torch.relu(x)).sum()


def train_step(model, x=None):
    model.zero_grad()
    if x is None:
        x = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4).to(model.conv1.weight.device)
    model(x).backward()
