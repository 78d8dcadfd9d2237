"""Low-rank adapters, and the linear layers that they change, by the names of Megatron, NeMo and Hugging Face."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting
from megatron_core.text_file import read_table

LORA = given("lora_rank", "N")
TUNES = Condition(
    "--lora-rank N, --dpo or --dsa-indexer-loss-coeff",
    lambda run: run.optional("lora_rank") is not None or run.optional("dpo") or run.model.trains_indexers,
)
WHOLE = "all"
"""The only part of a matrix that is not divided."""
_QKV = {"q": (0, 1), "k": (1, 2), "v": (2, 3)}
_DELTA_NET = {"qkv": (0, 3), "z": (3, 4), "b": (4, 5), "a": (5, 6), "qkvz": (0, 4), "ba": (4, 6)}
PARTS: dict[tuple[str, int], dict[str, tuple[int, int]]] = {
    ("linear_qkv", 3): _QKV,
    ("linear_qkv", 4): {"q": (0, 2), "k": (2, 3), "v": (3, 4)},
    ("linear_fc1", 2): {"gate": (0, 1), "up": (1, 2)},
    ("in_proj", 6): _DELTA_NET,
    ("in_proj", 4): _QKV | {"b": (3, 4)},
}
"""Name of a fused matrix, and number of matrices that it consists of -> its parts: half-open ranges of these matrices.

Gates of attention follow the queries, and belong to them. ``in_proj`` of a gated delta net consists of queries, keys,
values, gates z, rates b and decays a; that of Kimi delta attention of queries, keys, values and rates.
"""
_ATTENTION = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
_RECURRENT = ("in_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "out_proj")
LAYERS = ("linear_qkv", *_ATTENTION, "linear_proj", *_RECURRENT, "linear_fc1", "linear_fc2")
"""The linear layers of attention, recurrent layers and MLP."""
_WORDS = {**{name: name for name in LAYERS}, "all-linear": " ".join(LAYERS), **read_table(__file__)}
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    name: tuple((layer, part or WHOLE) for layer, _, part in (word.partition(".") for word in words.split()))
    for name, words in _WORDS.items()
}
"""Name in --lora-target-modules -> the layers that it may stand for, and the part of their matrix."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.TENSORS)
class TuningConfig:
    """Fine-tuning with low-rank adapters."""

    lora_rank: int | None = setting(None, r.SMALL_COUNT, when=ALWAYS, aliases="lora_r lora_dim")
    """Train low-rank adapters of this rank; all other weights are frozen and not saved (docs/fine_tune.md)."""
    lora_alpha: float = setting(32.0, r.POSITIVE, needs=LORA)
    """Numerator of the adapters' factor s = alpha / rank."""
    lora_dropout: float = setting(0.0, r.BELOW_1, needs=LORA, resume=Resume.REPORTED)
    """Dropout of the adapters' inputs."""
    lora_target_modules: tuple[str, ...] = setting(("all-linear",), needs=LORA)
    """Linear layers with adapters: names of Megatron (linear_qkv linear_proj linear_fc1 linear_fc2) or Hugging Face
    (q_proj v_proj ...), all-linear, or paths with * (*.layers.0.*.linear_qkv). q_proj, k_proj, v_proj, gate_proj and
    up_proj have separate adapters, as in peft."""
    use_rslora: bool = setting(False, needs=LORA)
    """Rank-stabilised factor s = alpha / sqrt(rank)."""
    use_dora: bool = setting(False, needs=LORA)
    """Also train the norm m of each row: W' = m (W + s B A) / |W + s B A| (DoRA)."""
    lora_load: str | None = setting(None, r.FOLDER, needs=LORA, resume=Resume.FREE)
    """Folder with adapters in PEFT's format to start from. A checkpoint in --load takes precedence."""
    pretrained_checkpoint: str | None = setting(None, r.FOLDER, needs=TUNES, resume=Resume.FREE)
    """Folder of checkpoints with the frozen weights of --lora-rank, of which --load then holds adapters, or with the
    initial weights of --dpo, which are also its reference, or of a model that gets indexers. (Or: --load-hf.)"""

    @property
    def lora_scale(self) -> float:
        """The factor s of B A."""
        assert self.lora_rank is not None, "there are adapters"
        return self.lora_alpha / (self.lora_rank**0.5 if self.use_rslora else self.lora_rank)

    def parts_of(self, path: str, *, fused: int) -> tuple[str, ...]:
        """The parts of a layer's matrix with an adapter; ``fused``: number of matrices that it consists of.

        ``path`` is the module's name in the model, such as decoder.layers.0.mlp.linear_fc1.
        """
        named = {weight_part for target in self.lora_target_modules for weight_part in _parts(target, path)}
        if fused <= 1:
            return (WHOLE,) if named else ()
        return tuple(
            weight_part
            for weight_part in (WHOLE, *PARTS.get((path.rpartition(".")[2], fused), ()))
            if weight_part in named
        )


def _parts(target: str, path: str) -> Iterator[str]:
    """The parts of the layer ``path`` that ``target`` names."""
    prefix, _, name = target.rpartition(".")
    module = path.rpartition(".")[2]
    for layer, weight_part in NAMES.get(name, ()):
        # A path begins at a module's name: experts.linear_fc1 does not stand for shared_experts.linear_fc1.
        if layer == module and (not prefix or fnmatchcase(f".{path}", f"*.{prefix}.{module}")):
            yield weight_part
