"""Chapter 9 of the book; ``build.py`` makes its page."""

# %% [markdown]
# # 9. Experts
#
# In a mixture of experts the MLP of a layer is replaced by E smaller ones, and a *router* chooses k of them for each
# token (Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformers"). Parameters grow with E, arithmetic only with k:

# %%
from small_runs import COLOURS, SMALL, kib, new_figure, print_table, save, start, train

from megatron_core.config import RunConfig
from megatron_core.config.flops import forward_flops_per_token
from megatron_core.training.step import train_step
from megatron_core.verify import run_ranks

EXPERTS = {
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_ffn_hidden_size": 128,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
}


def parameters(settings: dict) -> int:
    """Number of parameters of the model."""
    (stage,) = start(**settings).stages.values()
    return sum(weight.numel() for weight in stage.parameters())


rows = []
for count in (2, 4, 8, 16):
    settings = EXPERTS | {"num_experts": count}
    (total,) = run_ranks(1, parameters, settings)
    model = RunConfig.from_flat(SMALL | settings).model
    flops = sum(forward_flops_per_token(model, SMALL["seq_length"], SMALL["vocab_size"]).values())
    rows.append([count, f"{total:,}", f"{flops:,}"])
print_table(["experts", "parameters", "operations for a token, forward"], rows)

# %% [markdown]
# ## Expert parallelism
#
# The experts are distributed over the ranks that otherwise process different data. A token is sent to the ranks of its
# experts, and their outputs are sent back: two *all-to-alls* in the forward and two in the backward (Lepikhin et al.
# 2020, "GShard"). A rank with T tokens sends T k h numbers, except those for its own experts, (EP - 1) / EP of them
# with equal loads:

# %%
(one,) = train(1, 2, num_experts=8, **EXPERTS)
rows = []
for ep in (1, 2, 4):
    ranks = train(ep, 2, num_experts=8, expert_model_parallel_size=ep, micro_batch_size=2, **EXPERTS)
    assert all(abs(rank.losses[-1] - one.losses[-1]) < 1e-12 for rank in ranks)
    tokens = SMALL["global_batch_size"] // ep * SMALL["seq_length"]
    formula = 4 * SMALL["num_layers"] * tokens * 2 * SMALL["hidden_size"] * 8 * (ep - 1) / ep
    sent = [sum(size for name, size in rank.sent.items() if name.endswith("all_to_all")) for rank in ranks]
    rows.append([ep, kib(ranks[0].state["weights"]), kib(sum(sent) / ep), kib(formula)])
print_table(["ep", "weights of rank 0", "sent by all-to-alls, mean", "formula"], rows)

# %% [markdown]
# The losses are those of one process, for each number of ranks. The mean over the ranks is close to the formula. Single
# ranks differ, because tokens are not distributed equally.
#
# ## Balance
#
# The busiest rank determines the time of a layer. Nothing makes the router distribute tokens equally. On the contrary:
# an expert that gets more tokens learns faster, and is chosen more often. There are two remedies. An auxiliary loss
# adds the sum over the experts of (share of tokens) (mean probability), which is least if all are equal (Fedus et al.
# 2021, section 2.2). Or a bias is added to the scores for the choice only, and is moved after each step against the
# load (Wang et al. 2024; DeepSeek-V3).

# %%
STEPS = 30
COEFFICIENT = 0.02


def loads(settings: dict) -> list[float]:
    """Largest load of an expert divided by the mean load, the mean over the layers, after each step."""
    run = start(num_experts=8, **settings)
    found = []
    for _ in range(STEPS):
        by_layer = [list(load[:-1]) for load in train_step(run).expert_load.values()]
        found.append(sum(max(load) / (sum(load) / len(load)) for load in by_layer) / len(by_layer))
    return found


WAYS = {
    "nothing": EXPERTS,
    "auxiliary loss": EXPERTS | {"moe_aux_loss_coeff": COEFFICIENT},
    "bias": EXPERTS
    | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    },
}
figure, axes = new_figure("step", "largest load / mean load")
ends = {}
for (name, settings), colour in zip(WAYS.items(), COLOURS, strict=False):
    (curve,) = run_ranks(1, loads, settings)
    axes.plot(range(1, STEPS + 1), curve, color=colour, label=name)
    ends[name] = sum(curve[-10:]) / 10
save(figure, "expert_load", "largest load of an expert over the mean, for three ways to balance")
print_table(["balanced by", "largest / mean load, last 10 steps"], [[name, f"{end:.2f}"] for name, end in ends.items()])

# %% [markdown]
# A load of {{ "%.2f" | format(ends["nothing"]) }} means that the busiest expert takes this many times as long as the
# mean one, if each has a rank of its own. Capacity limits are the third remedy: an expert takes at most c T k / E
# tokens and drops the others.
#
# ## Experiment
#
# Change `COEFFICIENT = 0.02` to `COEFFICIENT = 0.2`. Is the load more equal? An auxiliary loss also changes the
# gradients of the model: its coefficient is a compromise, which the bias avoids.
