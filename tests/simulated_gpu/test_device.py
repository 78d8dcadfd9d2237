"""The simulated GPU refuses operations that a GPU refuses; results of operations on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_core.features.context_parallelism.products import Unfused, fused_products
from megatron_core.features.context_parallelism.tiles import Tile
from megatron_core.features.fp8.casts import COLUMNS, E4M3, E5M2, ROWS, WHOLE, Blocks, quantise
from megatron_core.features.fp8.scaled_product import dequantised_product, product, scaled_product_unavailable_reason
from megatron_core.verify.ranks import run_ranks
from tests.simulated_gpu.device import LOG, on_host
from tests.simulated_gpu.runtime import simulated_gpu

REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "a tensor of the CPU": (lambda x: x + torch.ones(4), "same device"),
    "a number of the CPU that is changed": (lambda x: torch.ones(()).add_(x[0]), "same device"),
    "a read without a copy": (lambda x: x.numpy(), "numpy"),
    "a product of integers": (lambda x: x.long().view(1, 4) @ x.long().view(4, 1), "not implemented"),
    "an argument that the function has not": (lambda x: torch.cuda.synchronize(stream=None), "unexpected keyword"),
    "a collective over the CPU's memory": (lambda x: torch.distributed.all_reduce(x.cpu()), "NCCL"),
    "a collective over a strided tensor": (lambda x: torch.distributed.all_reduce(x[::2]), "NCCL"),
}


def refusals() -> list[str]:
    found = []
    with simulated_gpu():
        for what, (call, reason) in REFUSED.items():
            with pytest.raises((RuntimeError, TypeError), match=reason):
                call(torch.ones(4, device="cuda"))
            found.append(what)
    return found


def test_refuses_what_a_gpu_refuses() -> None:
    assert run_ranks(1, refusals) == [list(REFUSED)]


def test_copies_arrive_with_a_synchronization() -> None:
    with simulated_gpu():
        host = torch.zeros(4, pin_memory=True)
        host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        assert host.isnan().all()
        torch.cuda.current_stream().synchronize()
        assert host.tolist() == [1.0] * 4
        there = host.to("cuda", non_blocking=True)
        host.zero_()
        with pytest.raises(RuntimeError, match="before it had been copied"):
            there.tolist()
        LOG.leaving.clear()


def test_copies_in_another_stream_arrive_with_its_events() -> None:
    with simulated_gpu():
        device, host = torch.ones(4, device="cuda"), torch.zeros(4, pin_memory=True)
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="does not wait for the computation"):
            host.copy_(device, non_blocking=True)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            host.copy_(device, non_blocking=True)
        left = stream.record_event()
        assert host.isnan().all()
        left.synchronize()
        assert host.tolist() == [1.0] * 4
        with torch.cuda.stream(stream):
            device.copy_(host, non_blocking=True)
        assert on_host(device).isnan().all()
        torch.cuda.synchronize()
        assert on_host(device).tolist() == [1.0] * 4
        with torch.cuda.stream(stream):
            device.copy_(host, non_blocking=True)
        device.zero_()
        with pytest.raises(RuntimeError, match="memory was changed before the copy in another stream ended"):
            current.wait_event(stream.record_event())
        other = torch.cuda.Stream()
        other.wait_stream(current)
        target = torch.zeros(4, device="cuda")
        other.wait_stream(current)
        with torch.cuda.stream(other):
            target.copy_(host, non_blocking=True)
        del target
        with pytest.raises(RuntimeError, match="memory was freed before the copy in another stream ended"):
            current.wait_event(other.record_event())


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [(WHOLE, WHOLE), (ROWS, COLUMNS), (Blocks(1, 128), Blocks(128, 128))],
    ids=["whole", "rows", "blocks"],
)
def test_fp8_products_are_those_of_the_cpu(of_a: Blocks, of_b: Blocks) -> None:
    """Sizes that are not multiples of 16, which GPUs multiply in bfloat16: scales must not be rounded to it."""
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(19, 256, generator=random), torch.randn(256, 21, generator=random)

    def computed(device: str) -> torch.Tensor:
        blocked = None not in of_a[1:]
        left = quantise(a.to(device), E4M3, of_a, power_of_two=blocked, backend="reference")
        right = quantise(b.to(device), E4M3, of_b, power_of_two=blocked, backend="reference")
        return dequantised_product(left, right, torch.float32).cpu()

    expected = computed("cpu")
    with simulated_gpu():
        found = computed("cuda")
    bound = 1e-6 if of_a in (WHOLE, ROWS) else 2e-2  # results of bfloat16 are rounded to it
    assert (found - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize(("of_a", "of_b"), [(WHOLE, WHOLE), (ROWS, COLUMNS), (ROWS, WHOLE)], ids=str)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_scaled_products_are_what_a_gpu_takes(
    of_a: Blocks, of_b: Blocks, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(1)
    a, b = torch.randn(19, 256, generator=random), torch.randn(256, 48, generator=random)
    expected = a.double() @ b.double()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    scaled_product_unavailable_reason.cache_clear()
    with simulated_gpu():
        left, right = (
            quantise(x.cuda(), *how, backend="reference") for x, how in ((a, (dtypes[0], of_a)), (b, (dtypes[1], of_b)))
        )
        found = product(left, right, torch.float32, fast_accumulation=True).cpu()
        wanted = (left.dequantised(torch.float32) @ right.dequantised(torch.float32)).cpu()
    scaled_product_unavailable_reason.cache_clear()
    assert (found - wanted).abs().max() < 2**-8 * wanted.abs().max()
    assert (wanted - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("channels", [16, 12, 264])
def test_flash_attention_takes_any_heads(channels: int) -> None:
    """torch's operator refuses head sizes that are not multiples of 8 or above 256; its module pads them."""
    random, tile = torch.Generator().manual_seed(1), Tile(None, (0, 5), (0, 5))
    query, key, value, grad = (torch.randn(2, 4, 5, channels, generator=random).bfloat16() for _ in range(4))
    out, lse = Unfused().forward(query.float(), key.float(), value.float(), tile, 0)
    expected = [out, lse, *Unfused().backward(grad, query, key, value, out, lse, tile, 0)]
    with simulated_gpu():
        inputs = [each.cuda() for each in (grad, query, key, value)]
        products = fused_products(inputs[0].device, torch.bfloat16)
        out, lse = products.forward(*inputs[1:], tile, 0)
        found = [each.cpu() for each in (out, lse, *products.backward(*inputs, out.bfloat16(), lse, tile, 0))]
    for number, wanted in zip(found, expected, strict=True):
        assert (number - wanted).abs().max() < 2e-2 * wanted.abs().max()
