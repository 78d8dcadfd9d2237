"""Requests that arrive during sampling join it, and trainings take steps in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.post_training.tinker.processes import NAME, save_model, server_of
from tests.post_training.tinker.test_client import PROMPT, learn

tinker = pytest.importorskip("tinker", reason="tinker needs Python 3.11")

LONG, SAMPLES = 100, 96
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"one process": (1, {}), "dp2": (2, {})}


def ask(sampler: Any, tokens: int, samples: int) -> Any:
    """The future of samples that do not end early."""
    params = tinker.SamplingParams(max_tokens=tokens, stop=[], seed=3)
    return sampler.sample(tinker.ModelInput.from_ints(PROMPT), samples, params)


@pytest.mark.every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_short_request_does_not_wait_for_a_long_one(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    save_model(tmp_path / "model")
    ranks, settings = LAYOUTS[layout]
    flags = {"lora_rank": 4, "seq_length": 112, "sampler_batch_size": 8, **settings}
    with (
        server_of(tmp_path / "model", ranks=ranks, **flags) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-none") as service,
    ):
        client = service.create_lora_training_client(NAME, rank=2, seed=1).result(timeout=60)
        base = service.create_sampling_client(base_model=NAME).result(timeout=60)
        alone = ask(base, LONG, 2).result(timeout=90)
        start = time.monotonic()
        long = [ask(base, LONG, SAMPLES), ask(base, LONG, 2)]
        short = ask(base, 2, 1).result(timeout=90)
        learn(client, [*PROMPT, 9, 8])
        joined = time.monotonic() - start
        # The samples of other weights wait until these have ended.
        other = client.save_weights_and_get_sampling_client().result(timeout=90)
        of_other = ask(other, 2, 1)
        assert not long[0].done()
        ended = long[0].result(timeout=180)
        whole = time.monotonic() - start
        assert joined < 0.7 * whole
        assert len(ended.sequences) == SAMPLES
        # An answer does not depend on other requests, nor on the parts in which it is sampled.
        for answers in (ended, long[1].result(timeout=90)):
            assert [answer.tokens for answer in answers.sequences[:2]] == [answer.tokens for answer in alone.sequences]
        assert short.sequences[0].tokens == alone.sequences[0].tokens[:2]
        assert len(of_other.result(timeout=90).sequences[0].tokens) == 2
        assert ask(base, 2, 1).result(timeout=90).sequences[0].tokens == short.sequences[0].tokens


def test_a_cancelled_request_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    save_model(tmp_path / "model")
    with (
        server_of(tmp_path / "model", lora_rank=4, seq_length=112, sampler_batch_size=8) as url,
        tinker.ServiceClient(base_url=url, api_key="tml-none") as service,
    ):
        base = service.create_sampling_client(base_model=NAME).result(timeout=60)
        alone = ask(base, LONG, 2).result(timeout=90)
        long = ask(base, LONG, 4 * SAMPLES)
        others = ask(base, LONG, 2)
        ask(base, 2, 1).result(timeout=90)
        start = time.monotonic()
        assert long.cancel()
        kept = others.result(timeout=90)
        assert [answer.tokens for answer in kept.sequences] == [answer.tokens for answer in alone.sequences]
        seconds = time.monotonic() - start
        start = time.monotonic()
        ask(base, LONG, SAMPLES).result(timeout=180)
        # Four times as many samples would have taken longer than these.
        assert seconds < 2.0 * (time.monotonic() - start)
