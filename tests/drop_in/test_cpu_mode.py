"""``python -m megatron_core.drop_in --cpu`` runs programs with GPUs written into them on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron.core.models.gpt  # the ranks, which are forks, need not import it
import megatron.core.pipeline_parallel.schedules  # noqa: F401
from tests.programs import run_ranks_of

TRAINING = """
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

assert torch.cuda.is_available()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group(backend="nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
parallel_state.initialize_model_parallel(dist.get_world_size())
model_parallel_cuda_manual_seed(7)
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=12, max_sequence_length=6).cuda()
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for step in range(3):
    tokens = torch.arange(6).remainder(5 + step)[None].pin_memory().cuda(non_blocking=True)
    positions = torch.arange(6, device=torch.cuda.current_device())[None]
    mask = torch.ones(1, 1, 6, 6, device="cuda").tril() < 0.5
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = model(tokens, positions, mask.to("cuda:0"), labels=tokens).mean()
    model.zero_grad_buffer()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    average = loss.detach().clone()
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"{average.item():.10f}")
"""
WITHOUT_CUDA = {
    "assert torch.cuda.is_available()\n": "",
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())\n': "",
    'backend="nccl", device_id=torch.device("cuda", torch.cuda.current_device())': 'backend="gloo"',
    ".pin_memory().cuda(non_blocking=True)": "",
    ".cuda()": "",
    ", device=torch.cuda.current_device()": "",
    ', device="cuda"': "",
    '.to("cuda:0")': "",
    "    with torch.cuda.stream(torch.cuda.Stream()):\n    ": "",
    "    torch.cuda.synchronize()\n    assert start.elapsed_time(end) > 0\n": "",
    "start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\n": "",
    "    start.record()\n": "",
    "    end.record()\n": "",
    "    dist.all_reduce(average, op=dist.ReduceOp.AVG)\n": "",
}
"""Edits that make the program one for a CPU."""


def run(text: str, folder: Path, flag: str = "--cpu", ranks: int = 1) -> list[str]:
    program = folder / "program.py"
    program.write_text(text)
    found = run_ranks_of(f"torchrun --nproc-per-node {ranks} -m megatron_core.drop_in {flag} {program}")
    assert found.returncode == 0, found.stderr
    return [line for line in found.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 prints these


def test_a_training_on_gpus_has_the_losses_of_its_cpu_version(tmp_path: Path) -> None:
    plain = TRAINING
    for text, other in WITHOUT_CUDA.items():
        assert text in plain
        plain = plain.replace(text, other)
    assert "cuda." not in plain
    expected = run(plain, tmp_path, flag="")
    assert len(set(expected)) == 3
    assert run(TRAINING, tmp_path, ranks=2) == expected


VALUES = {
    "torch.device(torch.cuda.current_device())": "cpu",
    "torch.device(type='cuda', index=1)": "cpu",
    "torch.device('meta')": "meta",
    "torch.nn.Linear(2, 2, device='cuda').to(0).weight.device": "cpu",
    "torch.nn.Linear(2, 2).to('meta').weight.device": "meta",
    "torch.cuda.LongTensor([3, 4]).to(torch.cuda.current_device()).tolist()": "[3, 4]",
    "torch.ones(2).type('torch.cuda.HalfTensor').dtype": "torch.float16",
    "torch.randn(2, pin_memory=True).shape": "torch.Size([2])",
    "torch.rand(1, generator=torch.Generator('cuda').manual_seed(3)) == seeded(3)": "tensor([True])",
    "isinstance(torch.default_generator, torch.Generator)": "True",
    "forked(lambda: torch.cuda.manual_seed(5)) == torch.initial_seed()": "True",
    "torch.cuda.manual_seed(5), torch.equal(torch.rand(2, device='cuda'), seeded(5, 2))": "None True",
    "restored('cuda:0').tolist(), restored(None).tolist()": "[1.0] [1.0]",
    "product(torch.autocast('cuda', dtype=torch.bfloat16)).dtype": "torch.bfloat16",
    "product(torch.autocast('cuda')).dtype": "torch.float16",
    "torch.amp.GradScaler('cuda', init_scale=8.0).scale(torch.ones(1)).tolist()": "[8.0]",
    "in_thread(lambda: torch.ones(1, device='cuda').device)": "cpu",
    "(x.cpu().add_(1), x.tolist())[1]": "[1.0]",
    "(x.to('cpu').add_(1), x.tolist())[1]": "[1.0]",
    "(x.to(torch.device('cpu'), torch.float32).add_(1), x.tolist())[1]": "[1.0]",
    "(x.to(device=torch.device('cpu'), non_blocking=True).add_(1), x.tolist())[1]": "[1.0]",
    "x.to('cpu', torch.float64).dtype": "torch.float64",
    "x.cuda() is x": "True",
    "x.is_cuda": "False",
    "in_own_thread('cuda')": "cpu",
    "reduced(torch.tensor([5]), op=dist.ReduceOp.AVG).tolist()": "[5]",
    "torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory > 0": "True",
    "torch.cuda.nvtx.range_push('a'), torch.cuda.cudart().cudaProfilerStart()": "None 0",
    "torch.compile(lambda t: t, backend='eager')(x).tolist()": "[1.0]",
    "dist.init_device_mesh('cuda', (1,)).device_type": "cpu",
    "dist.get_backend(dist.new_group([0], backend='nccl'))": "gloo",
    "dist.barrier(device_ids=[0])": "None",
    "reduced(torch.tensor([4.0]), op=dist.ReduceOp.AVG).tolist()": "[4.0]",
    "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1).cuda(), [0], 0)(x).shape": "torch.Size([1])",
    "torch.cuda.FloatTensor(2, 3).shape, isinstance(x, (torch.cuda.HalfTensor, torch.cuda.FloatTensor))": "3]) True",
    "torch.cuda.memory_stats()['allocated_bytes.all.current'], torch.cuda.memory_allocated()": "0 0",
    "error(torch.cuda.memory._record_memory_history)": "torch.cuda.memory._record_memory_history has no counterpart",
    "error(torch.cuda.CUDAGraph)": "torch.cuda.CUDAGraph has no counterpart on a CPU; switch it off for runs",
    "isinstance(torch.default_generator, type('Own', (torch.Generator,), {}))": "False",
    "issubclass(torch._C.Generator, torch.Generator)": "True",
    "isinstance(torch.cuda.Stream(), torch.Stream), isinstance(torch.cuda.Event(), torch.Event)": "True True",
    "isinstance(x, torch.cuda.CUDAGraph), issubclass(int, torch.cuda.graphs.CUDAGraph)": "False False",
    "is_current(torch.cuda.stream), is_current(lambda stream: stream)": "True True",
    "torch.cuda.current_stream() is torch.cuda.default_stream() is torch.accelerator.current_stream()": "True",
    "torch.cuda.memory.memory_allocated(), torch.cuda.random.initial_seed() == torch.initial_seed()": "0 True",
    "torch.cuda.get_arch_list().append(1), torch.cuda.get_arch_list()": "None []",
    "torch.accelerator.current_accelerator(), torch.accelerator.device_count()": "cpu 1",
    "dist.get_default_backend_for_device(torch.accelerator.current_accelerator())": "gloo",
    "torch.cpu.current_stream().record_event().query()": "True",
    "error(torch.cuda.cudart().cudaMalloc, 3)": "torch.cuda.cudart().cudaMalloc has no counterpart on a CPU",
    "error(dist.all_reduce, x, dist.ReduceOp.AVG, None, True)": "wait for the collective or use ReduceOp.SUM",
}
"""Expressions of a program, and a part of their text."""


@pytest.mark.parametrize("code", VALUES)
def test_every_request_for_a_gpu_resolves_to_the_cpu(code: str, answers: dict[str, str]) -> None:
    assert VALUES[code] in answers[code]


HELPERS = """
import threading

import torch
import torch.distributed as dist



def forked(change):
    before = torch.initial_seed()
    with torch.random.fork_rng():
        change()
    return before


dist.init_process_group("cpu:gloo,cuda:nccl")
x = torch.ones(1, device="cuda")

def seeded(seed, *size):
    return torch.rand(*(size or (1,)), generator=torch.Generator().manual_seed(seed))

def restored(location):
    torch.save(x, FILE)
    return torch.load(FILE, map_location=location)

def product(context):
    with context:
        return torch.ones(2, 2).cuda() @ torch.ones(2, 2).cuda()

def in_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

class OwnThread(threading.Thread):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def run(self):
        self.device = torch.ones(1, device=self.device).device

def in_own_thread(device):
    thread = OwnThread(device)
    thread.start()
    thread.join()
    return thread.device

def reduced(tensor, **given):
    dist.all_reduce(tensor, **given)
    return tensor

def is_current(context):
    stream = torch.cuda.Stream()
    with context(stream):
        return torch.cuda.current_stream() is stream

def error(function, *args):
    try:
        function(*args)
    except NotImplementedError as found:
        return str(found)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each expression's value in a program that runs with ``--cpu``."""
    folder = tmp_path_factory.mktemp("answers")
    text = HELPERS.replace("FILE", repr(str(folder / "x.pt"))) + "".join(f"print({code})\n" for code in VALUES)
    return dict(zip(VALUES, run(text, folder), strict=True))
