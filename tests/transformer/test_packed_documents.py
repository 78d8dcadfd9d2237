"""Documents in a sequence do not attend to each other, in all paths of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import DataError
from megatron_core.inference.kv_cache import CachedSpan, KVCache
from megatron_core.models import GPTModel
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import ForwardState, LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.core_attention import CoreAttention

VOCABULARY, LENGTH = 53, 24
LENGTHS = [[7, 1, 16], [24], [3, 11, 10]]
PLACES = [(0, 0, 7), (0, 7, 8), (0, 8, 24), (1, 0, 24), (2, 0, 3), (2, 3, 14), (2, 14, 24)]
"""Sequence, first token and end of each document in ``LENGTHS``."""
RESTARTED = torch.tensor([[i for n in own for i in range(n)] for own in LENGTHS])

EXACT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ROPE = {"position_embedding_type": "rope"}
PATHS = {
    "fused": EXACT,
    "fused, rope, groups": EXACT | ROPE | {"group_query_attention": True, "num_query_groups": 2},
    "unfused": EXACT | {"attention_backend": "unfused"},
    "unfused, rope, one group": EXACT
    | ROPE
    | {"group_query_attention": True, "num_query_groups": 1, "attention_backend": "unfused"},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "selective recompute": EXACT | ROPE | {"recompute_granularity": "selective"},
    "full recompute": {
        "attention_dropout": 0.2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def model_of(dtype: torch.dtype = torch.float64, **settings: object) -> GPTModel:
    """Two layers with weights large enough that every visible token matters."""
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, init_method_std=0.3, **settings)
    return GPTModel(config, VOCABULARY, LENGTH, parallel=ModelParallelConfig(params_dtype=dtype))


def tokens_of(seed: int) -> Tensor:
    """Tokens of three sequences."""
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


class Passes:
    """Forward passes of a model whose embeddings can be read and changed."""

    def __init__(self, model: GPTModel) -> None:
        self.model = model
        self.noise: Tensor | float = 0.0
        model.embedding.register_forward_hook(self._embedded)

    def _embedded(self, module: torch.nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        self.embedded = output + self.noise
        self.embedded.retain_grad()
        return self.embedded

    def logits(self, tokens: Tensor, lengths: list[list[int]] | None) -> Tensor:
        """Logits ``[b, s, vocabulary]`` with positions that restart."""
        return self.model(
            tokens, RESTARTED, sequences=SequenceDetails(document_lengths=lengths, sample_index=torch.arange(3))
        )

    def gradients(self, logits: Tensor, others: Tensor) -> dict[str, Tensor]:
        """Gradients of a loss over the tokens where ``others`` ``[b, s]`` is True: of all weights and of the
        embeddings."""
        self.model.zero_grad()
        (logits.sin().sum(-1) * others).sum().backward()
        found = {name: weight.grad.clone() for name, weight in self.model.named_parameters()}
        return found | {"embeddings": self.embedded.grad.transpose(0, 1)}


def moved(place: tuple[int, int, int], passes: Passes) -> tuple[Tensor, Tensor]:
    """Tokens in which those of one document are replaced, with noise on its embeddings; and the positions of the
    others."""
    row, start, stop = place
    others = torch.ones(3, LENGTH, dtype=torch.bool)
    others[row, start:stop] = False
    passes.noise = (torch.randn(LENGTH, 3, 32, dtype=torch.float64) * ~others.t()[..., None]).to(
        passes.model.embedding.word_embeddings.weight.dtype
    )
    return torch.where(others, tokens_of(1), (tokens_of(1) + 1 + tokens_of(2) % (VOCABULARY - 1)) % VOCABULARY), others


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_a_document_moves_nothing_of_another(path: str, place: tuple[int, int, int]) -> None:  # C45
    passes = Passes(model_of(**PATHS[path]))
    before = passes.logits(tokens_of(1), LENGTHS)
    others = torch.ones(3, LENGTH, dtype=torch.bool)
    others[place[0], place[1] : place[2]] = False
    gradients = passes.gradients(before, others)

    tokens, others = moved(place, passes)
    after = passes.logits(tokens, LENGTHS)
    assert torch.equal(after[others], before[others])
    assert not torch.isclose(after[~others], before[~others]).all(-1).any(), "the document itself moves everywhere"

    changed = passes.gradients(after, others)
    assert not changed["embeddings"][~others].any(), "a loss reaches a document that its tokens do not see"
    assert changed["embeddings"][others].abs().amax(-1).min() > 1e-6
    for name, gradient in gradients.items():
        assert torch.equal(changed[name], gradient), name


@pytest.mark.parametrize("path", PATHS)
def test_without_lengths_documents_leak(path: str) -> None:
    """The result of the previous test if the lengths had no effect."""
    passes = Passes(model_of(**PATHS[path]))
    before = passes.logits(tokens_of(1), None)
    tokens, others = moved(PLACES[0], passes)
    after = passes.logits(tokens, None)
    assert not torch.isclose(after[0, 7:], before[0, 7:]).all(-1).any()
    assert passes.gradients(after, others)["embeddings"][0, :7].abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("path", [path for path in PATHS if "dropout" not in path and path != "full recompute"])
def test_a_document_is_what_it_is_alone(path: str) -> None:  # C45
    passes = Passes(model_of(**PATHS[path]))
    tokens = tokens_of(3)
    packed = passes.logits(tokens, LENGTHS)
    for row, start, stop in PLACES:
        alone = passes.model(tokens[row : row + 1, start:stop])
        torch.testing.assert_close(packed[row, start:stop], alone[0], rtol=0, atol=1e-10)


def test_positions_that_do_not_restart_are_another_model() -> None:
    """With rotary positions too: they follow ``position_ids``."""
    for settings in (EXACT, EXACT | ROPE):
        model = model_of(**settings)
        plain = torch.arange(LENGTH).expand(3, -1)
        gaps = plain * 2 % LENGTH
        logits = [
            model(tokens_of(3), ids, sequences=SequenceDetails(document_lengths=LENGTHS))
            for ids in (None, plain, plain[:1], gaps)
        ]
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(logits[2], logits[0], rtol=0, atol=1e-12)
        assert not torch.allclose(logits[3], logits[0])


@pytest.mark.parametrize("settings", [EXACT, PATHS["fused, rope, groups"]])
def test_both_paths_and_the_mask_say_the_same(settings: dict) -> None:
    """A block mask written out from the definition can replace the lengths, and has no effect in addition to them."""
    masked = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool)
    for row, start, stop in PLACES:
        for query in range(start, stop):
            masked[row, 0, query, start : query + 1] = False
    logits = {
        (backend, with_mask, with_lengths): model_of(attention_backend=backend, **settings)(
            tokens_of(4),
            attention_mask=masked if with_mask else None,
            sequences=SequenceDetails(document_lengths=LENGTHS if with_lengths else None),
        )
        for backend in ("auto", "unfused")
        for with_mask, with_lengths in ((True, True), (True, False), (False, True))
    }
    expected = logits.pop(("unfused", True, False))
    for case, found in logits.items():
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11, msg=str(case))


def test_a_mask_may_hide_more_than_the_lengths() -> None:
    masked = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).repeat(3, 1, 1, 1)
    masked[:, :, 12:, 10] = True
    logits = [
        model_of(attention_backend=backend, **EXACT)(
            tokens_of(4), attention_mask=masked, sequences=SequenceDetails(document_lengths=LENGTHS)
        )
        for backend in ("auto", "unfused")
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    whole = model_of(**EXACT)(tokens_of(4), sequences=SequenceDetails(document_lengths=LENGTHS))
    seen = torch.isclose(logits[0], whole).all(-1)
    assert seen[0, :12].all() and not seen[0, 12:].any() and seen[2, 14:].all()


def test_memory_grows_with_the_sequence_not_with_its_square() -> None:
    """Bytes saved for backward, for documents of eight tokens in sequences of 64 and of 256."""

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        query, key, value = (torch.randn(length, 1, 4, 8, requires_grad=True) for _ in range(3))
        config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
        core = CoreAttention(LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1), 0)
        documents = PackedDocuments.of([[8] * (length // 8)], 1, length, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = core(query, key, value, SequenceContext(documents=documents))
        assert output.requires_grad
        return sum(sizes.values())

    assert 0 < kept(256) <= 4 * kept(64)


def test_bfloat16() -> None:  # C45
    passes = Passes(model_of(torch.bfloat16, **EXACT, **ROPE))
    before = passes.logits(tokens_of(1), LENGTHS)
    tokens, others = moved(PLACES[5], passes)
    after = passes.logits(tokens, LENGTHS)
    assert after.dtype == torch.bfloat16
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[~others], before[~others])


def test_the_block_mask_is_made_once() -> None:
    documents = PackedDocuments.of([[2, 1], [3]], 2, 3, torch.device("cpu"))
    expected = [[[0, 1, 1], [0, 0, 1], [1, 1, 0]], [[0, 1, 1], [0, 0, 1], [0, 0, 0]]]
    assert documents.masked.tolist() == [[[[bool(x) for x in row] for row in own]] for own in expected]
    assert documents.masked is documents.masked


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([[24], [24]], "2 sequences, and the batch has 3"),
        ([[24], [12, 11], [24]], r"document_lengths\[1\]=\[12, 11\] must be above 0 and add up to 24"),
        ([[24], [24], []], r"document_lengths\[2\]=\[\]"),
        ([[24, 0], [24], [24]], r"document_lengths\[0\]=\[24, 0\] must be above 0"),
    ],
)
def test_lengths_that_do_not_fill_the_sequences(lengths: list[list[int]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        model_of(**EXACT)(tokens_of(1), sequences=SequenceDetails(document_lengths=lengths))


@pytest.mark.parametrize("path", ["fused", "fused, rope, groups", "unfused", "unfused, rope, one group"])
@torch.inference_mode()
def test_documents_with_a_cache_are_new_sequences_in_it(path: str) -> None:
    """Their logits, and those of one more token each, equal those of passes without a cache."""
    model, tokens, more = model_of(**PATHS[path]).eval(), tokens_of(1)[:1], [5, 9, 14]
    cache = KVCache(tokens.device, 4, 64)
    cache.reserve(64)
    tables = [list(range(n, 60, 3)) for n in range(3)]
    # A document of one token comes first in the row; the others are chunks from position 0 on.
    order = sorted(range(3), key=lambda n: LENGTHS[0][n] > 1)
    row = torch.cat([tokens[:, first:end] for _, first, end in (PLACES[n] for n in order)], dim=1)
    positions = cache.begin([CachedSpan(0, LENGTHS[0][n], tables[n]) for n in order])
    together = dict(
        zip(
            order,
            model(row, position_ids=positions, state=ForwardState(cache=cache))[0].split(
                [LENGTHS[0][n] for n in order]
            ),
            strict=True,
        )
    )
    positions = cache.begin([CachedSpan(LENGTHS[0][n], 1, tables[n]) for n in range(3)])
    following = model(torch.tensor([more]), position_ids=positions, state=ForwardState(cache=cache))[0]
    for n, ((_, first, end), token, found) in enumerate(zip(PLACES, more, following, strict=False)):
        alone = model(torch.cat([tokens[:, first:end], torch.tensor([[token]])], dim=1))[0]
        torch.testing.assert_close(together[n], alone[:-1], atol=1e-11, rtol=0.0)
        torch.testing.assert_close(found, alone[-1], atol=1e-11, rtol=0.0)
