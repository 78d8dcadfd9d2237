"""Import modules by the names that they had in the version before, with a note."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "megatron_core"
MOVED = {
    "training.stop": "training.built_in_callbacks",
    "config.norms": "config.layer_settings",
    "checkpoint.transfer": "features.local_copies.transfer",
    "checkpoint.restore": "features.local_copies.restore",
    "checkpoint.copies": "features.local_copies.copies",
    "monitor.timers": "reports.timers",
    "monitor.record_schema": "reports.metrics",
    "monitor.rank_records": "reports.metrics",
    "monitor.goodput": "reports.goodput",
    "schedules.trace": "reports.trace_files",
    "training.pipeline_trace": "reports.pipeline_trace",
    "datasets.whole_round": "datasets.base",
    "tokenizers.vocabulary": "tokenizers.build",
    "config.bad_steps": "config.training",
    "config.token_ids": "config.ranges",
    "monitor.sampling": "reports.measurements",
    "training.attempts": "training.parts",
    "training.reports": "training.built_in_callbacks",
    "config.activation": "config.layer_settings",
    "config.latent_attention": "config.layer_settings",
    "config.mup": "config.layer_settings",
    "config.rotary": "config.layer_settings",
    "monitor.expert_load": "reports.metrics",
    "checkpoint.hosts": "checkpoint.chunks",
    "config.layer_block": "config.layer_settings",
    "config.recompute": "config.layer_settings",
    "config.compression": "config.parallel",
    "datasets.parts": "training.data",
    "config.rules_run": "config.rules_data",
    "training.failures": "resilience.failure_log",
    "training.bad_steps": "resilience.bad_steps",
    "config.heterogeneous": "features.layer_sizes.settings",
    "config.sparse_attention": "features.sparse_attention.settings",
    "config.multi_token": "features.multi_token.settings",
    "config.recurrent": "features.recurrent.settings",
    "config.hybrid": "features.recurrent.settings",
    "ops.paged_attention": "inference.paged_attention",
    "parallel.interrupt": "cpu_ranks.interrupt",
    "parallel.filled_work": "cpu_ranks.filled_work",
    "schedules.draw": "reports.timelines",
    "tensor_parallel.log_z": "transformer.z_loss",
    "config.fp8": "features.fp8.settings",
    "features.sparse_attention.warmup": "features.sparse_attention.new_indexers",
    "any_model.meta": "any_model.module",
    "any_model.zero_grad": "any_model.direct",
    "hub.averaged_reader": "hub.adapter_export",
    "hub.hugging_face.families.deepseek_v2": "hub.hugging_face.families.deepseek",
    "hub.hugging_face.families.deepseek_v3": "hub.hugging_face.families.deepseek",
    "hub.hugging_face.families.deepseek_v32": "hub.hugging_face.families.deepseek",
    "hub.hugging_face.families.phi3": "hub.hugging_face.families.phi",
    "hub.hugging_face.families.phimoe": "hub.hugging_face.families.phi",
    "config.no_attention": "config.mixers",
    "config.rules_recurrent": "features.recurrent.rules",
    "config.rules_hybrid": "features.recurrent.rules",
    "config.resilience": "resilience.settings",
    "transformer.paged_attention": "inference.paged_step",
    "config.outer": "features.outer_steps.settings",
    "training.new_indexers": "features.sparse_attention.new_indexers",
    "training.tuning": "training.initial_weights",
    "config.rules_tuning": "features.lora.rules",
    "post_training.offload": "features.offload.state",
    "config.tuning": "features.lora.settings",
    "transformer.adapters": "features.lora.adapters",
    "tensor_parallel.lora": "features.lora.layer",
    "config.depth": "features.presets.depth",
    "config.presets": "features.presets.published",
    "parallel.recovery": "resilience.processes",
    "parallel.links": "resilience.links",
    "checkpoint.host_copy": "resilience.state_copies",
    "checkpoint.tensor_hashes": "reports.tensor_hashes",
    "training.state_hashes": "reports.state_hashes",
    "training.memory_report": "reports.memory_report",
    "training.dry_run": "reports.dry_run",
    "monitor.summary": "reports.summary",
    "monitor.plot_experts": "reports.plot",
    "monitor.plot_memory": "reports.plot",
    "monitor.plot_pipeline": "reports.plot",
    "monitor.prediction": "reports.diagnosis",
    "monitor.diagnosis_rules": "reports.diagnosis_rules",
    "monitor.diagnosis": "reports.diagnosis",
    "monitor.hash_records": "reports.hash_records",
    "monitor.plot": "reports.plot",
    "monitor.report": "reports.report",
    "monitor.page": "reports.page",
    "config.rules_fp8": "features.fp8.rules",
    "data_parallel.fp8_gather": "features.fp8.gather",
    "ops.fp8_product": "features.fp8.scaled_product",
    "ops.fp8_grouped": "features.fp8.grouped_product",
    "ops.fp8": "features.fp8.casts",
    "tensor_parallel.amax_history": "features.fp8.amax_history",
    "tensor_parallel.fp8": "features.fp8.products",
    "config.megatron_model": "hub.rules",
    "optimizer.torch_optimizer": "any_model.torch_optimizer",
    "config.trainer_flags": "features.megatron_flags.tables",
    "config.launch_flags": "features.megatron_flags.launch_flags",
    "config.megatron_flags": "features.megatron_flags.tables",
    "config.translate": "config.flags",
    "config.short_schedules": "verify.shrink",
    "config.together": "verify.together",
    "config.shrink": "verify.shrink",
    "config.comparison": "verify.comparison",
    "monitor.trainer_callback": "reports.trainer_callback",
    "monitor.tensorboard": "reports.metric_sinks",
    "monitor.prometheus": "reports.metric_sinks",
    "monitor.mlflow": "reports.metric_sinks",
    "monitor.wandb": "reports.metric_sinks",
    "config.invariance": "config.tree",
    "config.rules_invariance": "features.equal_bits.rules",
    "parallel.invariance": "features.equal_bits.invariance",
    "ops.fixed_products": "features.equal_bits.fixed_products",
    "ops.exact_sum": "features.equal_bits.exact_sum",
    "transformer.invariant_attention": "features.equal_bits.attention",
    "tensor_parallel.invariant_kernels": "features.equal_bits.kernels",
    "tensor_parallel.invariant_linear": "features.equal_bits.linear",
    "datasets.validate": "preprocess.validate",
    "datasets.lengths": "preprocess.lengths",
    "datasets.atomic_write": "preprocess.atomic_write",
    "datasets.builder": "preprocess.builder",
    "parallel.simulated": "cpu_ranks.simulated",
    "parallel.shared_memory": "cpu_ranks.shared_memory",
    "training.averaged_reader": "hub.adapter_export",
    "transformer.multi_token": "features.multi_token.block",
    "config.rules_outer": "features.outer_steps.rules",
    "training.outer_state": "features.outer_steps.state",
    "optimizer.outer_messages": "features.outer_steps.messages",
    "optimizer.outer": "features.outer_steps.optimizer",
    "config.rules_sparse_attention": "features.sparse_attention.rules",
    "config.inference": "inference.settings",
    "config.rules_heterogeneous": "features.layer_sizes.rules",
    "transformer.compiled": "features.compilation.layers",
    "transformer.offload": "features.offload.activations",
    "optimizer.pipeline": "features.offload.pipeline",
    "data_parallel.placement": "features.offload.placement",
    "optimizer.fused": "features.matrix_optimizers.updates",
    "optimizer.soap": "features.matrix_optimizers.soap",
    "optimizer.matrix_updates": "features.matrix_optimizers.updates",
    "optimizer.matrix_plan": "features.matrix_optimizers.plan",
    "data_parallel.announcements": "data_parallel.agreement",
    "data_parallel.bucket_kind": "data_parallel.settings",
    "data_parallel.completion": "data_parallel.early_sums",
    "data_parallel.first_use": "data_parallel.wrapper",
    "data_parallel.units": "data_parallel.fill",
    "training.averages": "features.averages.weights",
    "training.choices": "features.questions.scores",
    "datasets.choices": "features.questions.dataset",
    "config.modelopt": "features.distillation.modelopt",
    "training.teacher": "features.distillation.teacher",
    "training.distillation": "features.distillation.objective",
    "tensor_parallel.distillation": "features.distillation.loss",
    "training.reference": "features.preferences.frozen",
    "training.preferences": "features.preferences.objective",
    "datasets.preferences": "features.preferences.dataset",
    "datasets.megatron_order": "features.megatron_order",
    "datasets.fim": "features.fill_in_the_middle.dataset",
    "tokenizers.template_process": "features.conversations.template_process",
    "tokenizers.template_sandbox": "features.conversations.template_sandbox",
    "tokenizers.chat": "features.conversations.chat_template",
    "datasets.packing": "features.conversations.packing",
    "datasets.tool_calls": "features.conversations.tool_calls",
    "datasets.message_keys": "features.conversations.message_keys",
    "datasets.message_schemas": "features.conversations.schemas",
    "datasets.conversation_tokenizer": "features.conversations.encoder",
    "datasets.conversation_notes": "features.conversations.line_notes",
    "datasets.build_conversations": "features.conversations.build",
    "datasets.conversations": "features.conversations.dataset",
    "training.state_copies": "resilience.state_copies",
    "training.recovery_choice": "resilience.recovery_choice",
    "training.recovery": "resilience.recovery",
    "monitor.chrome_trace": "reports.profile",
    "parallel.links.seal": "resilience.links.recorder",
    "training.checks": "reports.checks",
    "monitor.replicas": "reports.replicas",
    "training.link_checks": "resilience.link_checks",
    "training.faults": "resilience.faults",
    "checkpoint.tensors_in_storage": "storage.tensors",
    "datasets.streaming": "storage.tokens",
    "training.run_files": "storage.run_files",
    "training.hash_records": "reports.state_hashes",
    "training.profile": "reports.profile",
    "training.rerun": "resilience.rerun",
    "training.adapter_export": "hub.adapter_export",
    "training.megatron_state": "hub.megatron_lm.format",
    "training.deepspeed_conversion": "hub.deepspeed_conversion",
    "training.conversion": "hub.conversion",
    "models.deepspeed": "hub.deepspeed",
    "models.megatron_lm": "hub.megatron_lm",
    "models.hf.expert_rules": "hub.hugging_face.rules",
    "models.hf.pickled": "hub.hugging_face.files",
    "models.hf.mxfp4": "hub.hugging_face.quantized",
    "models.hf.fp8_blocks": "hub.hugging_face.quantized",
    "models.deepspeed.joining": "hub.deepspeed.checkpoint",
    "models.deepspeed.universal": "hub.deepspeed.shards",
    "models.megatron_lm.pickle_keys": "hub.megatron_lm.pickles",
    "models.megatron_lm.stored_state": "hub.megatron_lm.arguments",
    "models.megatron_lm.mixers": "hub.megatron_lm.tensor_map",
    "models.hf": "hub.hugging_face",
    "training.engine": "any_model",
}
"""New names of modules and packages by old ones, without the package's name."""


def new_name(module: str) -> str | None:
    """Today's name of a module with an old name; None for every other module."""
    path = module.split(".")
    if path[0] != PACKAGE:
        return None
    for length in range(len(path), 1, -1):
        target = MOVED.get(".".join(path[1:length]))
        if target is not None:
            return ".".join([PACKAGE, target, *path[length:]])
    return None


class _NewModule(Loader):
    """Returns the module with the new name instead of loading a second copy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.name}; import it from there", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's own specification by that of the old name.
        module.__spec__ = self.spec


class OldNames(MetaPathFinder):
    """Finds modules by their old names. It comes first: a moved package's path would find its modules twice."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """A specification that returns the module with the new name; None for names that did not move."""
        name = new_name(fullname)
        return None if name is None else ModuleSpec(fullname, _NewModule(name))


def install() -> None:
    """Let old names work in this process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())


MOVED_NAMES = {
    "datasets.IndexedDatasetBuilder": "preprocess.builder",
    "datasets.write_header": "preprocess.builder",
    **{f"storage.{name}": "locations" for name in ("in_storage", "local_copy", "location", "read_part", "real")},
    "storage.StoragePath": "storage.paths",
    "monitor.read_metrics": "reports.metrics",
}
"""Names that a package exported in the version before, and the modules that define them now."""


def old_names_of(package: str) -> Callable[[str], Any]:
    """A function ``__getattr__`` of a package that finds names it exported before, with a note."""

    def find(name: str) -> Any:
        module = MOVED_NAMES.get(f"{package.removeprefix(f'{PACKAGE}.')}.{name}")
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        note = f"{package}.{name} has moved to {PACKAGE}.{module}; import it from there"
        warnings.warn(note, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)

    return find
