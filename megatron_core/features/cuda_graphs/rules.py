"""Rules of CUDA graphs of layers."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.cuda_graphs.settings import GraphConfig
from megatron_core.schedules import schedules

REFUSED = {
    "lora_rank": "layers with adapters are not captured",
    "heterogeneous_layers_config_path": "graphs of layers of different sizes are not tested",
    "heterogeneous_layers_config_encoded_json": "graphs of layers of different sizes are not tested",
}
"""Settings that graphs exclude, with the reason."""


def graph_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that a CUDA graph, which repeats the same kernels on the same memory, excludes."""
    graphs = config.section(GraphConfig)
    parallel = config.parallel
    model = config.model
    if graphs.cuda_graph_impl == "none":
        return
    values = config.flat()
    for name, reason in REFUSED.items():
        if values.get(name):
            yield f"{name}={values[name]} cannot be used with cuda_graph_impl=local: {reason}; remove one of them"
    passes_messages = not set(values["cp_comm_type"]) <= {"a2a", "all_gather"}
    schedule = parallel.schedule(model.num_layers)
    excluded = {
        f"zero_stage={parallel.dp_zero_stage}": parallel.dp_zero_stage >= 2,
        f"cp_comm_type={' '.join(values['cp_comm_type'])}": parallel.context_parallel_size > 1 and passes_messages,
        f"pipeline_schedule={schedule}": schedules()[schedule].splits_backward or parallel.runs_in_pairs(config),
        f"cuda_graph_modules={' '.join(graphs.cuda_graph_modules)} and parallel_residual_shared_norm=True": (
            bool(graphs.cuda_graph_modules) and model.parallel_residual_shared_norm
        ),
        "attention_backend=flex": model.attention_backend == "flex",
        "reset_attention_mask=True": config.data.reset_attention_mask,
        "recompute_granularity=full": model.recompute_granularity == "full",
        f"recompute_modules={' '.join(model.recompute_modules)}": any(
            map(model.recomputes, ("layernorm", "mla_up_proj"))
        ),
        "cpu_offloading=True": model.cpu_offloading,
    }
    for other in (assigned for assigned, is_so in excluded.items() if is_so):
        yield f"cuda_graph_impl=local cannot be used with {other}; remove one of them"
