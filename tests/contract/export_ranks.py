"""What a trainer rank writes of its shards, in a process that imports torch and nothing else."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def rank_main(rank: int, root: Path, directory: Path) -> None:
    """Writes this rank's share of `root/weights.pt` below `directory`; collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.load(root / "weights.pt")
    live = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save(live | {f"rng.{rank}": torch.get_rng_state()}, checkpoint_id=directory)
    dist.destroy_process_group()
