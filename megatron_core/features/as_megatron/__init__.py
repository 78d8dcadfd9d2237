"""The differences of a training from Megatron-LM's, and the switch that chooses Megatron-LM's behaviour."""

from megatron_core.feature import Feature, Switch

AS_MEGATRON = Feature(
    name="as_megatron",
    is_used=lambda config: True,
    switches={
        "as_megatron": Switch(
            "Train as Megatron-LM does where the default differs: every setting of the list of differences in "
            "--dry-run that no flag and no entry of --config gives.",
            "megatron_core.features.as_megatron.differences:settings_of_megatron",
        ),
    },
    run_part="megatron_core.features.as_megatron.note:DifferenceNote",
)
