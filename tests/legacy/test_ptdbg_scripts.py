# SPDX-License-Identifier: Apache-2.0
"""Run the snippets of the guide as they are printed, in a training on the stand-in npu; several cards are processes that talk by gloo.

Where the guide prints "...", a step of training stands. Its misprints are corrected.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.legacy.forking import Job, Outcome, run_all
from tests.legacy.ptdbg_programs import apis, files, lines, names, rank_folder

SCRIPTS = Path(__file__).parent / "scripts"
HEAD = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nfrom ptdbg_model import *\nmodel = Model().to('npu')\n"
NPU = "from ulpscope.testing import npu\nnpu.install(stand_in_torch_npu=True)\n"

WHOLE_NET = """
from ptdbg_ascend import *

# 在main函数开始前固定随机数
seed_all()

# 配置dump数据目录路径和名称
set_dump_path("./npu_dump", dump_tag='all')

# 注册dump回调函数
register_hook(model, acc_cmp_dump)

...

# 在第一个迭代开始的位置开启dump和堆栈模式，同时为保证数据完整性开启dump bool和整型的tensor以及浮点、bool和整型的标量
set_dump_switch("ON", mode="api_stack", filter_switch="OFF")

...

# 在第一个迭代结束的位置关闭dump
set_dump_switch("OFF")
"""

COMPARE = """
from ptdbg_ascend import *
dump_result_param={
"npu_pkl_path": "./npu_dump/all_v4.0/rank0/api_stack_dump.pkl",
"bench_pkl_path": "./gpu_dump/all_v4.0/rank0/api_stack_dump.pkl",
"npu_dump_data_dir": "./npu_dump/all_v4.0/rank0/api_stack_dump",
"bench_dump_data_dir": "./gpu_dump/all_v4.0/rank0/api_stack_dump",
"is_print_compare_log": True
}
compare(dump_result_param, "./output", stack_mode=True)
"""

EXAMPLES = """
set_dump_switch("ON", mode="list", scope=["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"])
set_dump_switch("ON", mode="range", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"])
set_dump_switch("ON", mode="stack", scope=["Tensor_abs_1_forward", "Tensor_transpose_3_forward"])
set_dump_switch("ON", mode="api_list", api_list=["relu"])
set_dump_switch("ON", mode="api_stack")
set_dump_switch("ON", filter_switch="OFF")
set_dump_switch("ON", dump_mode=["backward"])
set_dump_switch("ON", summary_only=True)
""".strip().splitlines()

AUTOMATIC = """
from ptdbg_ascend import *
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="{hook}", step=[0,2], enable_dataloader=True)
# 请勿将以上初始化流程插入到循环代码中
train_loader = torch.utils.data.DataLoader(
	torch.linspace(-1, 1, 96).reshape(6, 1, 4, 4),
	batch_size = 2,
	shuffle = False,
	num_workers = 0
)
for epoch in range(2):
    for batch in train_loader:
        {work}
"""

MANUAL = """
from ptdbg_ascend import *
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump", step=[0])
# 请勿将以上初始化流程插入到循环代码中

# 模型初始化
# 下面代码也可以用PrecisionDebugger.start()和PrecisionDebugger.stop()
debugger.start()

# 需要dump的代码片段1
...

debugger.stop()
debugger.start()

# 需要dump的代码片段1
...

debugger.stop()
debugger.step()
"""

OVERFLOW = """
from ptdbg_ascend import *
seed_all()
# 配置溢出数据目录路径和名称
set_dump_path("./overflow_dump")
...
# 设置检测到3次溢出后退出训练
register_hook(model, overflow_check, overflow_nums=3)

...
big = torch.full((3,), 6e4, dtype=torch.float16, device="npu")
for _ in range(9):
    big + big
"""

JUDGED = """
import os, runpy, sys, torch
from ptdbg_ascend import *
set_dump_path("./overflow_dump")
register_hook(None, overflow_check, overflow_nums=-1)
big = torch.full((3,), 6e4, dtype=torch.float16)
big + big
PrecisionDebugger.forget()
sys.argv = ["run_overflow_check.py", "-forward", f"./forward_info_{os.getpid()}.json"]
runpy.run_module("api_accuracy_checker.run_ut.run_overflow_check", run_name="__main__")
"""

MODULES = """
# 根据需要import包
import os
import torch
import torch.nn as nn
import torch_npu
from ptdbg_ascend import *

torch.npu.set_device("npu:0")
# 定义一个简单的网络
class ModuleOP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_features=2, out_features=2)
        self.linear_2 = nn.Linear(in_features=2, out_features=1)
        self.relu = nn.ReLU()
    def forward(self, x):
        x1 = self.linear_1(x)
        x2 = self.linear_2(x1)
        r1 = self.relu(x2)
        return r1

if __name__ == "__main__":
    module = ModuleOP().npu()

    # 注册工具
    set_dump_path("./dump_data/npu")
    register_hook(module, acc_cmp_dump)
    set_dump_switch("ON")

    x = torch.randn(2, 2).npu()

    module_dump(module, "MyModule")    # 开启模块级精度数据dump
    out = module(x)
    module_dump_end()    # 结束模块级精度数据dump
    loss = out.sum()
    loss.backward()
    set_dump_switch("OFF")
"""

ACL = """
from ptdbg_ascend import *

# 固定随机数，开启确定性计算
seed_all(mode=True)
set_dump_path("./dump_path", dump_tag='forward')
register_hook(model, acc_cmp_dump, dump_mode='acl', dump_config='./dump.json')

# dump指定前向API的ACL级别数据、bool和整型的tensor以及浮点、bool和整型的标量
set_dump_switch("ON", mode="acl", scope=["Tensor_permute_1_forward"], filter_switch="OFF")
"""

# A record that the old tool's authors published, and the sample that their guide prints.
RECORDED = """
import torch
from ptdbg_ascend import *
seed_all()
linear = torch.nn.Linear(2, 3)
x = torch.randn(3, 2)
set_dump_path("d")
register_hook(linear, acc_cmp_dump)
linear, x = linear.to("npu"), x.to("npu")
set_dump_switch("ON")
torch.nn.functional.relu(linear(x))
set_dump_switch("OFF")
seed_all()
conv = torch.nn.Conv2d(1, 2, 2)
x = torch.randn(2, 1, 2, 2)
set_dump_path("c")
set_dump_switch("ON")
conv(x)
set_dump_switch("OFF")
"""

VENDOR = """
import torch, torch_npu
from ptdbg_ascend import *
set_dump_path("d")
register_hook(None, acc_cmp_dump)
x = torch.ones(2, 4, device="npu", requires_grad=True)
original = torch_npu.npu_rotary_mul
set_dump_switch("ON", mode="api_list", api_list=["npu"])
torch_npu.npu_rotary_mul(x, x * 2, x * 3).sum().backward()
torch_npu.npu_fast_gelu(x)
set_dump_switch("OFF")
assert torch_npu.npu_rotary_mul is original
"""

DROPOUT = """
import torch, torch.nn as nn, torch.nn.functional as F
import ptdbg_ascend
x = torch.ones(64)
assert (F.dropout(x) == 0).any()
from ptdbg_ascend import *
for drop in (F.dropout, F.dropout2d, F.dropout3d, nn.Dropout(0.9), nn.Dropout2d(0.9), nn.Dropout3d(0.9)):
    assert torch.equal(drop(x.reshape(1, 2, 2, 4, 4)), x.reshape(1, 2, 2, 4, 4)), drop
set_dump_path("d")
register_hook(None, acc_cmp_dump)
set_dump_switch("ON")
nn.Dropout2d(0.5)(x.reshape(1, 4, 4, 4))
F.dropout(x)
set_dump_switch("OFF")
from ulpscope.compat.ptdbg.dropout import restore_dropout
restore_dropout()
assert (F.dropout(x) == 0).any()
"""

SEEDS = """
import os, random, sys
import numpy as np, torch
from ptdbg_ascend import *
def draw():
    return random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, device="npu").item()
seed_all(mode=True)
first = draw()
seed_all(1234)
assert first == draw()
seed_all(seed=1000)
assert first != draw()
assert os.environ["PYTHONHASHSEED"] == "1000"
assert torch.cuda.initial_seed() == 1000 if torch.cuda.is_available() else True
assert torch.are_deterministic_algorithms_enabled()
cudnn = torch.backends.cudnn
assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) == (False, False, True)
"""

CARDS = """
import os, sys, torch
import torch.distributed as dist
from ptdbg_ascend import *
seed_all()
set_dump_path('./dump_resnet')

rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{os.getcwd()}/meeting")
t, zero = torch.full((2,), rank + 1.0), torch.zeros(2)
lists = lambda: [torch.zeros(2), torch.zeros(2)]
originals = {name: getattr(dist, name) for name in ("all_reduce", "_all_gather_base")}

register_hook(None, acc_cmp_dump)
set_dump_switch("ON", mode="api_list", api_list=["distributed"])
if rank == 0:
    dist.send(t, 1)
    dist.isend(t, 1).wait()
else:
    dist.recv(torch.zeros(2), 0)
    dist.irecv(torch.zeros(2), 0).wait()
dist.broadcast(t.clone(), 0)
dist.all_reduce(t.clone())
dist.reduce(t.clone(), 0)
dist.all_gather(lists(), t)
dist.gather(t, lists() if rank == 0 else None, dst=0)
dist.scatter(torch.zeros(2), [t, t * 2] if rank == 0 else None, src=0)
dist.reduce_scatter(torch.zeros(2), [t, t * 10])
dist._reduce_scatter_base(torch.zeros(1), t)
dist._all_gather_base(torch.zeros(4), t)
set_dump_switch("OFF")
assert all(getattr(dist, name) is original for name, original in originals.items())

model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
debugger = PrecisionDebugger(dump_path="./dump_path", hook_name="dump", rank=1)
debugger.start()
model(t.reshape(1, 2)).sum().backward()
debugger.stop()
debugger.step()

set_dump_path("./overflow_dump")
register_hook(model, overflow_check, overflow_nums=2)
big = torch.full((2,), 6e4, dtype=torch.float16)
print("begin")
for number in range(rank + 1):
    big + big
print("end", rank)
dist.destroy_process_group()
"""


def in_training(snippet: str) -> str:
    return HEAD + snippet.replace("...", "train_step(model)")


def whole_flow() -> str:
    """Dump on the npu, dump on the CPU, compare: each as the guide prints it."""
    on_cpu = WHOLE_NET.replace("npu_dump", "gpu_dump")
    return in_training(f"{WHOLE_NET}\nPrecisionDebugger.forget()\nmodel = model.cpu()\n{on_cpu}\nos.mkdir('output')\n{COMPARE}")


def every_example() -> str:
    parts = [
        f"set_dump_path('./dump_path', dump_tag='example{number}')\nregister_hook(model, acc_cmp_dump)\n{example}\n...\n"
        "set_dump_switch('OFF')\nPrecisionDebugger.forget()\n"
        for number, example in enumerate(EXAMPLES, 1)
    ]
    return in_training("from ptdbg_ascend import *\nseed_all()\n" + "".join(parts))


def automatic(hook: str, work: str) -> str:
    return in_training(AUTOMATIC.format(hook=hook, work=work))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return how every script ended; the cards are `card0` and `card1`."""
    scripts = {
        "whole_net": "import os\n" + whole_flow(),
        "examples": every_example(),
        "automatic": automatic("dump", "train_step(model, batch.to('npu'))"),
        "automatic_overflow": automatic("overflow_check", "(batch.to('npu') * 1e30).square()"),
        "manual": in_training(MANUAL),
        "overflow": in_training(OVERFLOW),
        "judged": JUDGED,
        "modules": NPU + MODULES,
        "acl": in_training(ACL),
        "recorded": NPU + RECORDED,
        "vendor": NPU + VENDOR,
        "dropout": DROPOUT,
        "seeds": NPU + SEEDS,
        "cards": CARDS,
    }
    scratch = tmp_path_factory.mktemp("scripts")
    for name, text in scripts.items():
        (scratch / name).mkdir()
        (scratch / name / "script.py").write_text(text, encoding="utf-8")
    (scratch / "acl" / "out").mkdir()
    settings = '{"dump": {"dump_list":[], "dump_path":"./out", "dump_mode":"all", "dump_op_switch":"on"}}'
    (scratch / "acl" / "dump.json").write_text(settings)
    jobs = {
        name: Job(str(scratch / name), environment={"ULPSCOPE_NPU_ARITHMETIC": "reduced"} if name in ("recorded", "whole_net") else {})
        for name in scripts
        if name != "cards"
    }
    jobs |= {f"card{rank}": Job(str(scratch / "cards"), arguments=[str(rank)], group="cards") for rank in range(2)}
    return dict(zip(jobs, run_all(list(jobs.values()), scratch), strict=True))


@pytest.mark.promise("P003")
def test_the_whole_flow_ends_in_a_table(outcomes: dict[str, Outcome]) -> None:
    (table,) = (outcomes["whole_net"].succeeded() / "output").glob("compare_result_*.csv")
    with table.open(newline="", encoding="utf-8-sig") as stream:
        rows = {row["NPU Name"]: row for row in csv.DictReader(stream)}
    convolution = rows["Functional_conv2d_0_forward_output"]
    assert 0 < float(convolution["MaxAbsErr"]) < 1e-3
    assert 0.999 < float(convolution["Cosine"]) <= 1
    assert rows["Functional_conv2d_0_forward_input.0"]["MaxAbsErr"] == "0.000000000000"
    assert convolution["Accuracy Reached or Not"] == "Yes"


@pytest.mark.promise("P022", "P023")
def test_dumping_a_whole_net(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["whole_net"].succeeded() / "npu_dump" / "all_v4.0" / "rank0"
    assert files(folder) == ["api_stack_dump", "api_stack_dump.pkl", "compare_data.py"]
    found = apis(folder / "api_stack_dump.pkl")
    assert {"Functional_conv2d_1_forward", "Functional_conv2d_1_backward", "Functional_batch_norm_0_forward"} <= set(found)
    stack = next(line for line in lines(folder / "api_stack_dump.pkl") if line[0] == "Functional_relu_0_forward_stack_info")
    assert stack[1][0][2:] == ["Model.forward", "return F.relu(torch.relu(x)).sum()"]


@pytest.mark.promise("P092", "P093", "P094", "P096", "P097", "P098", "P099", "P129")
def test_the_examples_of_set_dump_switch(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["examples"].succeeded()
    folders = [rank_folder(folder / "dump_path", f"example{number}") for number in range(1, 9)]
    whole = apis(folders[4] / "api_stack_dump.pkl")
    part = whole[whole.index("Tensor_abs_1_forward") : whole.index("Tensor_transpose_3_forward") + 1]
    assert apis(folders[0] / "list_dump.pkl") == ["Tensor_permute_1_forward", "Tensor_transpose_2_forward", "Torch_relu_3_backward"]
    assert apis(folders[1] / "range_dump.pkl") == apis(folders[2] / "stack_dump.pkl") == part
    assert files(folders[2]) == ["stack_dump.pkl"]
    assert apis(folders[3] / "api_list_dump.pkl") == [name for name in whole if "relu" in name]
    assert apis(folders[5] / "dump.pkl") == whole
    assert apis(folders[6] / "dump.pkl") == [name for name in whole if name.endswith("backward")]
    assert all("backward" in file for file in files(folders[6] / "dump"))
    assert files(folders[7]) == ["compare_data.py", "dump.pkl"]


@pytest.mark.promise("P078", "P104")
def test_the_automatic_mode(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["automatic"]
    assert outcome.failed().endswith("Exception: ptdbg: exit after iteration [0, 2]")
    assert files(outcome.folder / "dump_path") == ["step0", "step2"]
    first, third = (rank_folder(outcome.folder / "dump_path" / name) / "api_stack_dump.pkl" for name in ("step0", "step2"))
    assert apis(first) == apis(third)


@pytest.mark.promise("P056", "P100", "P104")
def test_the_automatic_mode_of_the_overflow_check(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["automatic_overflow"]
    assert "ValueError: [overflow 1 times]: dump file is saved in '" in outcome.failed().splitlines()[-1]
    assert files(rank_folder(outcome.folder / "dump_path" / "step0")) == ["Tensor_square_0_forward_1", "Tensor_square_0_forward_1.pkl"]


@pytest.mark.promise("P079", "P102", "P103")
def test_the_manual_mode(outcomes: dict[str, Outcome]) -> None:
    found = apis(rank_folder(outcomes["manual"].succeeded() / "dump_path" / "step0") / "api_stack_dump.pkl")
    assert {"Functional_conv2d_0_forward", "Functional_conv2d_3_forward", "Functional_conv2d_3_backward"} <= set(found)


@pytest.mark.promise("P052", "P056", "P057")
def test_the_overflow_check(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["overflow"]
    assert "ValueError: [overflow 3 times]: dump file is saved in '" in outcome.failed().splitlines()[-1]
    assert (rank_folder(outcome.folder / "overflow_dump") / "Tensor___add___2_forward_3.pkl").is_file()
    assert list(outcome.folder.glob("forward_info_*.json"))


@pytest.mark.promise("P058")
def test_the_parser_of_overflows_judges_what_the_check_wrote(outcomes: dict[str, Outcome]) -> None:
    printed = outcomes["judged"]
    printed.succeeded()
    assert "Tensor___add___0 forward: normal overflow" in printed.output


@pytest.mark.promise("P137", "P138", "P139")
def test_the_sample_of_modules(outcomes: dict[str, Outcome]) -> None:
    found = apis(rank_folder(outcomes["modules"].succeeded() / "dump_data" / "npu") / "dump.pkl")
    assert [name for name in found if "randn" not in name and "npu" not in name] == [
        "MyModule_0_forward", "Tensor_sum_0_forward", "Tensor_sum_0_backward", "MyModule_0_backward",
    ]  # fmt: skip


@pytest.mark.refused("P027")
def test_the_snippet_at_acl_level_ends_with_what_is_missing(outcomes: dict[str, Outcome]) -> None:
    printed = outcomes["acl"].failed()
    assert "a dump of Tensor_permute_1_forward at ACL level needs Ascend's CANN" in printed
    assert "mode='api_stack'" in printed


@pytest.mark.promise("P116", "P152")
def test_the_recorded_dump_of_a_device_comes_out_again(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["recorded"].succeeded()
    found = {line[0]: line[5] for line in lines(rank_folder(folder / "d") / "dump.pkl")}
    assert found["Functional_linear_0_forward_input.0"][:2] == [1.948258399963379, -1.0052297115325928]
    assert found["Functional_linear_0_forward_input.1"][:2] == [0.28375449776649475, -0.6661239266395569]
    assert found["Functional_linear_0_forward_input.2"][:2] == [0.2457989901304245, -0.6338542103767395]
    assert found["Functional_linear_0_forward_output"][:2] == [0.8278868794441223, -0.8729169964790344]
    assert found["Functional_relu_0_forward_output"][:2] == [0.8278868794441223, 0.0]
    printed = {line[0]: line[5] for line in lines(rank_folder(folder / "c") / "dump.pkl")}
    assert printed["Functional_conv2d_0_forward_input.0"] == [1.576936960220337, -0.9757485389709473, 0.4961632490158081]
    assert printed["Functional_conv2d_0_forward_input.1"] == [0.20064473152160645, -0.47102075815200806, -0.20796933770179749]
    assert printed["Functional_conv2d_0_forward_input.2"] == [0.17380613088607788, -0.16853803396224976, 0.0026340484619140625]
    assert printed["Functional_conv2d_0_forward_output"][0] == 0.02364911139011383
    assert printed["Functional_conv2d_0_forward_output"][1] in (-1.762906551361084, -1.7629066705703735)
    assert printed["Functional_conv2d_0_forward_output"][2] == pytest.approx(-0.6710853576660156, abs=6e-8)


@pytest.mark.promise("P035", "P036", "P153")
def test_operations_of_the_vendor_are_one_call_each(outcomes: dict[str, Outcome]) -> None:
    from ulpscope.compat.ptdbg.files.vendor_ops import NPU_OPS

    assert len(NPU_OPS) == len(set(NPU_OPS)) == 51
    pkl = rank_folder(outcomes["vendor"].succeeded() / "d") / "api_list_dump.pkl"
    assert apis(pkl) == ["NPU_npu_rotary_mul_0_forward", "NPU_npu_rotary_mul_0_backward"]
    assert next(name for name in names(pkl) if "backward_output" in name) == "NPU_npu_rotary_mul_0_backward_output.0"


@pytest.mark.promise("P120")
def test_importing_switches_dropout_off_and_it_is_still_dumped(outcomes: dict[str, Outcome]) -> None:
    pkl = rank_folder(outcomes["dropout"].succeeded() / "d") / "dump.pkl"
    assert apis(pkl)[-2:] == ["Functional_dropout2d_0_forward", "Functional_dropout_0_forward"]


@pytest.mark.promise("P116", "P117")
def test_seed_all_fixes_every_generator(outcomes: dict[str, Outcome]) -> None:
    outcomes["seeds"].succeeded()


# ---- several cards


@pytest.mark.promise("P033", "P034", "P037", "P038")
def test_communication_is_dumped_by_every_card(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["card0"].succeeded()
    both = "broadcast all_reduce reduce all_gather gather scatter reduce_scatter _reduce_scatter_base _all_gather_base".split()
    for rank, own in ((0, ["send", "isend"]), (1, ["recv", "irecv"])):
        pkl = rank_folder(folder / "dump_resnet", rank=rank) / "api_list_dump.pkl"
        assert apis(pkl) == [f"Distributed_{name}_0_forward" for name in own + both]

    def values(rank: int, name: str) -> list[float]:
        data = rank_folder(folder / "dump_resnet", rank=rank) / "api_list_dump"
        return np.load(data / f"Distributed_{name}.npy", allow_pickle=False).tolist()  # type: ignore[no-any-return]

    for rank in (0, 1):
        assert values(rank, "all_reduce_0_forward_input.0") == [rank + 1.0] * 2
        assert values(rank, "all_reduce_0_forward_output.0") == [3.0, 3.0]
        assert values(rank, "broadcast_0_forward_output.0") == [1.0, 1.0]
        assert values(rank, "all_gather_0_forward_output.0.1") == [2.0, 2.0]
        assert values(rank, "_all_gather_base_0_forward_output.0") == [1.0, 1.0, 2.0, 2.0]
    assert values(1, "recv_0_forward_input.0") == [0.0, 0.0]
    assert values(1, "recv_0_forward_output.0") == [1.0, 1.0]
    assert values(1, "scatter_0_forward_output.0") == [2.0, 2.0]


@pytest.mark.promise("P034", "P076")
def test_one_card_alone_can_be_dumped(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["card0"].succeeded()
    assert files(folder / "dump_path" / "ptdbg_dump_v4.0") == ["rank1"]
    found = apis(rank_folder(folder / "dump_path", rank=1) / "api_stack_dump.pkl")
    assert {"Functional_linear_0_forward", "Functional_linear_0_backward"} <= set(found)


@pytest.mark.promise("P053", "P100")
def test_each_card_counts_its_own_overflows(outcomes: dict[str, Outcome]) -> None:
    folder = outcomes["card0"].succeeded()
    assert "ValueError: [overflow 2 times]" in outcomes["card1"].failed()
    assert sorted(file.name for file in (folder / "overflow_dump").rglob("*.pkl")) == [
        "Tensor___add___0_forward_1.pkl", "Tensor___add___0_forward_1.pkl", "Tensor___add___1_forward_2.pkl",
    ]  # fmt: skip
    assert names(next((folder / "overflow_dump").rglob("*_2.pkl")))[0] == "Tensor___add___1_forward_stack_info"
