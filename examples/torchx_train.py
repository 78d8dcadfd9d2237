"""A component of TorchX: training under any of its schedulers (Slurm, Kubernetes, AWS Batch, Docker, this machine).

    pip install torchx
    torchx run --scheduler local_cwd examples/torchx_train.py:train --save checkpoints -- --mock-data --vocab-size 256 \
      --train-iters 20
    torchx run --scheduler kubernetes examples/torchx_train.py:train --nodes 2 --gpus 8 --save s3://bucket/run \
      --image REGISTRY/megatron-native:0.2.0 -- --config examples/gpt_1b.yaml --data-path s3://bucket/corpus_text_document

The flags after -- are those of megatron-train. Every attempt resumes from the newest checkpoint of --save.
"""

from torchx import specs
from torchx.components import dist


def train(
    *flags: str,
    save: str,
    nodes: int = 1,
    ranks: int = 2,
    gpus: int = 0,
    cpus: int = 2,
    memory: int = 4096,
    image: str = "",
    retries: int = 3,
) -> specs.AppDef:
    """Training that resumes after failures.

    Args:
        flags: flags of megatron-train
        save: folder or URL of the checkpoints, which all nodes share
        nodes: number of nodes
        ranks: number of ranks of a node without GPUs
        gpus: number of GPUs, and of ranks, of a node
        cpus: number of cores of a node
        memory: MiB of memory of a node
        image: container image, for schedulers that use one
        retries: number of restarts by the scheduler
    """
    return dist.ddp(
        *("--save", save, "--load", save, *flags),
        script="pretrain_gpt.py",
        name="/pretrain",
        image=image,
        cpu=cpus,
        gpu=gpus,
        memMB=memory,
        j=f"{nodes}x{gpus or ranks}",
        max_retries=retries,
    )
