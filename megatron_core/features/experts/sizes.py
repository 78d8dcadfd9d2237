"""The sizes of a layer with experts."""

from collections.abc import Iterator

from megatron_core.config.linear_layers import FeedForward, LinearLayer
from megatron_core.features.experts.settings import MoEConfig


class ExpertSizes(FeedForward):
    """A router, E experts of which a token uses k, and shared experts, which each token uses."""

    recomputed_as = "moe"
    model: MoEConfig

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """The linear layers of the experts, of the projections of latents, and of the shared experts."""
        model, latent = self.model, self.model.moe_latent_size
        if latent is not None:
            yield LinearLayer("mlp.fc1_latent_proj", model.hidden_size, (latent,))
            yield LinearLayer("mlp.fc2_latent_proj", latent, (model.hidden_size,))
        local = (model.num_experts or 0) // ep
        yield from self.pair("mlp.experts", model.expert_hidden_size, model.expert_ffn_size // etp, local)
        if (shared := model.moe_shared_expert_intermediate_size) is not None:
            yield from self.pair("mlp.shared_experts", model.hidden_size, shared // tp)

    def router_matrices(self) -> Iterator[tuple[int, int]]:
        """The router, and the gate of the shared experts."""
        yield self.model.num_experts or 0, self.model.hidden_size
        if self.model.moe_shared_expert_gate and self.model.moe_shared_expert_intermediate_size is not None:
            yield 1, self.model.hidden_size

    def saved_bytes(self, number: int, etp: int) -> float:
        """Bytes for the shared experts, as an MLP, the router and the experts, with the mean load and no dropped
        tokens. With E experts, k experts per token, expert width f, n bytes per element and u tensor ranks of an
        expert:

            4 h (16-bit only) + 4 E (3 x with balancing loss)    input of the router in float32; logits
            + k (n u h + n 3 f (gated: 4 f))                     dispatched rows; before and after the activation
                                                                 function, and times the probability
            with latents of l channels: k n u l instead of k n u h, and n (h + l) for the inputs of their projections
        """
        model = self.model
        shared = 0 if model.recomputes("shared_experts") else model.moe_shared_expert_intermediate_size or 0
        saved = number * shared * (3 if model.gated_linear_unit else 2)
        if model.recomputes("moe"):
            return saved
        inner = ((4 if model.gated_linear_unit else 3) - 2 * model.recomputes("moe_act")) * model.expert_ffn_size
        saved += model.moe_router_topk * number * (etp * model.expert_hidden_size + inner)
        if model.moe_latent_size is not None:
            saved += number * (model.hidden_size + model.moe_latent_size)
        logits = 4 * (model.num_experts or 0) * (3 if model.balancing_loss else 1)
        return saved + logits + (4 * model.hidden_size if number < 4 else 0)

    def flops(self) -> dict[str, int]:
        """FLOPs of the router, the experts of a token, the projections of latents, and the shared experts."""
        model, hidden, matrices = self.model, self.model.hidden_size, 3 if self.model.gated_linear_unit else 2
        shared = model.moe_shared_expert_intermediate_size or 0
        return {
            "router": 2 * hidden * (model.num_experts or 0),
            "experts": 2 * model.expert_hidden_size * model.expert_ffn_size * model.moe_router_topk * matrices,
            "latents": 4 * hidden * (model.moe_latent_size or 0),
            "shared": 2 * hidden * (shared * matrices + model.moe_shared_expert_gate),
        }
