"""Floating-point operations of the model, computed from its sizes.

Narayanan et al. 2021 (arXiv 2104.04473), equation 3 and appendix. A product of an m x k and a k x n matrix counts
2 m k n; norms, activations, softmax and the embedding look-up do not count. The causal mask is ignored: scores and
weighted values count all S keys of each query, as in the paper.
"""

# Without the paper's factor for recomputation: the utilisation computed from these numbers counts useful work only
# (Korthikanti et al. 2022, appendix: *model* FLOPs).
# Newer releases of Megatron-LM count half of the keys of causal attention, and so print less for long sequences. Here
# all keys count, so that numbers can be compared with published ones.

from functools import lru_cache

from megatron_core.config.linear_layers import feed_forward_of
from megatron_core.config.mixers import mixer_of
from megatron_core.config.model import ModelConfig


def forward_flops_per_token(model: ModelConfig, seq_length: int, vocab_size: int) -> dict[str, int]:
    """Forward FLOPs of one token, by term, over all layers.

    With h hidden, d channels a head, a heads, g groups, f MLP width, S tokens, V vocabulary (padded), L layers:

        qkv     2 h (a + 2 g) d L    scores  2 S a d L    values  2 S a d L    output  2 a d h L
        mlp     2 h f (2, gated 3) L                      logits  2 h V, once
    """
    # The terms of other layers:
    # - a window of W keys: S is at most W; a linear layer in place of attention or MLP: 2 h^2 in output or mlp
    # - E experts, of which a token takes k of width f, instead of mlp: router 2 h E, experts 2 h f k (2, gated 3),
    #   shared 2 h f_shared (2, gated 3), its gate 2 h
    # - latents of widths q and c, heads of d + r channels for queries and keys and of v for values: scores and values
    #   have these widths, output is 2 a v h L, and qkv 2 (h (q + c + r) + a (q (d + r) + c (d + v))) L; without the
    #   queries' latent h a (d + r) for both terms of q
    # - hyper-connections of n streams: connections 2 n h (n^2 + 2 n) for attention and for the MLP
    # - a recurrence: scores are its convolution, values its updates of the state
    # - multi-token prediction, each of its layers: mtp, a layer as the last one, 4 h^2 and logits.
    return dict(_forward_flops(model, seq_length, vocab_size))


@lru_cache(maxsize=64)  # a search over layouts asks for the same model thousands of times
def _forward_flops(model: ModelConfig, seq_length: int, vocab_size: int) -> dict[str, int]:
    layers, hidden = range(model.num_layers), model.hidden_size
    terms: dict[str, int] = {}
    for layer in layers:
        for name, flops in layer_flops(model, layer, seq_length).items():
            terms[name] = terms.get(name, 0) + flops
    terms["logits"] = 2 * hidden * model.head_columns(vocab_size)
    if model.added_layers:  # each a layer as the last one, a projection from 2 h to h, and logits
        of_layer = sum(layer_flops(model, len(layers), seq_length).values())
        terms["mtp"] = model.added_layers * (of_layer + 4 * hidden * hidden + terms["logits"])
    return terms


def layer_flops(model: ModelConfig, layer_number: int, seq_length: int) -> dict[str, int]:
    """Forward FLOPs of one token in a layer (numbered from 0), by term, as in ``forward_flops_per_token``."""
    mixer = mixer_of(model, layer_number)
    window = model.window_of_layer(layer_number)
    width = seq_length if window is None or window[0] < 0 else min(seq_length, window[0] + 1)
    scores, values = mixer.score_flops(min(width, model.chunk_of_layer(layer_number) or width))
    projections = mixer.projections(1)
    terms = {
        "qkv": 2 * sum(projection.elements for projection in projections[:-1]),
        "scores": scores,
        "values": values,
        "output": 2 * sum(projection.elements for projection in projections[-1:]),
        "mlp": 0,
    }
    if model.connection_elements[0]:
        sublayers = model.has_mixer(layer_number) + model.has_mlp(layer_number)
        terms["connections"] = 2 * model.connection_elements[0] * sublayers
    return terms | feed_forward_of(model, layer_number).flops()


def flops_per_token(model: ModelConfig, seq_length: int, vocab_size: int) -> int:
    """Forward and backward FLOPs of one token of the whole model.

    Backward takes two products for each one of forward: the input's and the weight's gradient. For a
    GPT with ``f = 4h`` this is ``72 h^2 L (1 + S / 6h + V / 12hL)``: 6 for each weight in a matrix, plus
    attention.
    """
    return 3 * sum(forward_flops_per_token(model, seq_length, vocab_size).values())
