"""Synchronised BatchNorm on the CPU: two processes train as one.

    torchrun --nproc-per-node 2 examples/sync_batch_norm.py

Every process has a part of the batch, and the parts differ: the first has fewer samples, and of another kind. A plain
BatchNorm normalises each part by itself, so the model that comes out depends on how the batch was cut. With normgrad's
SyncBatchNorm the processes normalise by the statistics of all samples, and the model is the one that a single process
with the whole batch gets. (PyTorch's own SyncBatchNorm takes no tensors on the CPU.)
"""

from __future__ import annotations

import copy
import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normgrad.torch import convert_sync_batchnorm

SAMPLES, STEPS = 32, 5


def make_model() -> nn.Module:
    """A small network with an ordinary BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 1))


def make_data() -> tuple[Tensor, Tensor]:
    """Images of two kinds, sorted: dark ones first."""
    torch.manual_seed(1)
    kind = torch.arange(SAMPLES).ge(SAMPLES // 2).float().unsqueeze(1)
    return torch.randn(SAMPLES, 1, 8, 8) + 3 * kind[:, :, None, None], kind


def parts_of(tensor: Tensor, ranks: int) -> list[Tensor]:
    """The samples of each rank: the first gets a quarter of them, the others share the rest."""
    if ranks == 1:
        return [tensor]
    first = SAMPLES // 4
    return [tensor[:first], *tensor[first:].tensor_split(ranks - 1)]


def train(model: nn.Module, images: Tensor, kinds: Tensor, ranks: int) -> list[float]:
    """The losses over all samples, step by step."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.005)
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = (model(images) - kinds).square().sum() / SAMPLES
        (loss * ranks).backward()  # DistributedDataParallel averages over the ranks; the loss is a sum over them
        optimiser.step()
        total = loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    return losses


def main() -> None:
    """Train three times and compare."""
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node 2 examples/sync_batch_norm.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    images, kinds = make_data()
    parts = parts_of(images, ranks)
    mine, my_kinds = parts[rank], parts_of(kinds, ranks)[rank]

    one_process = make_model()
    plain = copy.deepcopy(one_process)
    synchronised = convert_sync_batchnorm(copy.deepcopy(one_process))
    losses = {
        "BatchNorm": train(DistributedDataParallel(plain), mine, my_kinds, ranks),
        "SyncBatchNorm": train(DistributedDataParallel(synchronised), mine, my_kinds, ranks),
        "one process, whole batch": train(one_process, images, kinds, 1),
    }
    if rank == 0:
        print(f"{ranks} processes, with {', '.join(str(len(part)) for part in parts)} samples\n")
        print(f"{'loss after step':<26}" + "".join(f"{step:>10}" for step in range(1, STEPS + 1)))
        for name, values in losses.items():
            print(f"{name:<26}" + "".join(f"{value:>10.5f}" for value in values))
        print("\nlargest distance of a parameter or running statistic from the single process:")
        for name, model in {"BatchNorm": plain, "SyncBatchNorm": synchronised}.items():
            print(f"{name:<26}{distance(model, one_process):>10.1e}")
    # The wrappers are in reference cycles and hold the process group. Its threads end with it; one that still holds a
    # tensor when Python ends would abort the process.
    gc.collect()
    dist.destroy_process_group()


def distance(model: nn.Module, other: nn.Module) -> float:
    """How far two models' states are apart."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    main()
