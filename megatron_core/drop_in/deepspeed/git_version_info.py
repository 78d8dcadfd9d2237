"""The version of DeepSpeed whose interface these modules have."""

version = "0.19.8"
git_hash = "megatron-native"
git_branch = "drop-in"
