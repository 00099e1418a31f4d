# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""An expert-parallel MoE layer: gloo on CPUs, NCCL on GPUs, any number of processes.

    torchrun --nproc-per-node 2 examples/train_expert_parallel.py
    torchrun --nproc-per-node 2 examples/train_expert_parallel.py --capacity 700
    torchrun --nproc-per-node 2 examples/train_expert_parallel.py --save out --save-at 10
    torchrun --nproc-per-node 2 examples/train_expert_parallel.py --resume out

All four end in the same hash of all weights and optimizer states. Each rank sends `capacity` rows
to each rank, whatever the router chose, so no size depends on the routing and nothing waits for a
device. Rows without a token hold NaN, as a reused buffer might: the op does not read them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

import te_grouped_mlp


class AllToAll(torch.autograd.Function):
    """Block r of the rows goes to rank r; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return what the ranks sent, in their order."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the gradients of what was sent."""
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class ExpertParallelMoE(torch.nn.Module):
    """A router that every rank has, and this rank's share of the experts."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.world = dist.get_world_size()
        if args.experts % self.world:
            raise SystemExit(f"--experts {args.experts}: allowed: multiples of {self.world} ranks")
        self.local, self.topk, self.capacity = args.experts // self.world, args.topk, args.capacity
        self.router = torch.nn.Linear(args.hidden, args.experts, bias=False, device=device)
        self.experts = common.Experts(self.local, args.hidden, args.ffn, device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output, (tokens, hidden), and how many choices found no room."""
        tokens, hidden = x.shape
        probs, expert = self.router(x.float()).softmax(-1).topk(self.topk)
        slot = self._slots(expert.flatten())
        rows = self.world * self.capacity
        # One more row takes what finds no room.
        empty = float("nan")
        each = x[:, None].expand(tokens, self.topk, hidden).reshape(-1, hidden)
        send = x.new_full((rows + 1, hidden), empty).index_copy(0, slot, each)[:rows]
        prob = probs.new_full((rows + 1,), empty).index_copy(0, slot, probs.flatten())[:rows]
        mine = expert.new_full((rows + 1,), self.local)
        mine = mine.index_copy(0, slot, expert.flatten() % self.local)[:rows]
        got, got_prob, got_mine = AllToAll.apply(send), AllToAll.apply(prob), torch.empty_like(mine)
        dist.all_to_all_single(got_mine, mine)
        # By expert; rows without a token come last, in the tail of the buffer.
        order = got_mine.argsort(stable=True)
        counts = torch.nn.functional.one_hot(got_mine, self.local + 1).sum(0)[: self.local]
        y = self.experts(got[order], got_prob[order], counts)
        back = AllToAll.apply(torch.empty_like(got).index_copy(0, order, y))
        back = torch.cat([back, back.new_zeros(1, hidden)])
        combined = back[slot].view(tokens, self.topk, hidden).float().sum(1)
        return combined.to(x.dtype), (slot == rows).sum()

    def _slots(self, expert: torch.Tensor) -> torch.Tensor:
        """Return the row to send each choice in; the row past the end where a block is full."""
        order = expert.argsort(stable=True)
        rank = (expert // self.local)[order]
        place = torch.arange(len(rank), device=rank.device) - torch.searchsorted(rank, rank)
        rows = self.world * self.capacity
        slot = torch.where(place < self.capacity, rank * self.capacity + place, rows)
        return torch.empty_like(slot).index_copy(0, order, slot)


def train(args: argparse.Namespace, device: torch.device) -> tuple[str, list[float]]:
    """Train, and return a hash of all ranks' weights and states, and the losses."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens = args.tokens[rank % len(args.tokens)]
    # Each rank has experts of its own, and all have the same router.
    torch.manual_seed(args.seed + rank)
    model = ExpertParallelMoE(args, device)
    dist.broadcast(model.router.weight.data, 0)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=3e-3)
    file = f"rank{rank}-of-{world}.pt"
    first, losses = 0, []
    if args.resume:
        state = torch.load(args.resume / file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["step"], state["losses"]
    teacher = _normal(args.hidden, args.hidden, seed=7, device=device) / args.hidden**0.5
    total = sum(args.tokens[each % len(args.tokens)] for each in range(world))
    for step in range(first, args.steps):
        x = _normal(tokens, args.hidden, seed=1000 * (step % 4) + rank, device=device)
        y, dropped = model(x.bfloat16())
        target = torch.tanh(x @ teacher) / 2
        loss = (y.float() - target).square().sum() / (total * args.hidden)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        dist.all_reduce(model.router.weight.grad)
        optimizer.step()
        said = torch.stack([loss.detach(), dropped.float()])
        dist.all_reduce(said)
        losses.append(float(said[0]))
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {losses[-1]:.5f}, {int(said[1])} without room", flush=True)
        if args.save and step + 1 == args.save_at:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            common.save({**state, "step": step + 1, "losses": losses}, args.save / file)
    te_grouped_mlp.assert_fused()
    hashes: list[Any] = [None] * world
    own = te_grouped_mlp.digest(common.everything(model, optimizer))
    dist.all_gather_object(hashes, own)
    whole = torch.tensor([int(each, 16) >> 1 for each in hashes])
    return te_grouped_mlp.digest(whole), losses


def _normal(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=4, help="a multiple of the ranks")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=128)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[256],
        metavar="N[,N]",
        help="tokens of each rank; a rank may have none",
    )
    parser.add_argument(
        "--capacity", type=int, help="rows for each pair of ranks; default: room for every choice"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    parser.add_argument("--save-at", type=int, default=10, metavar="STEP")
    parser.add_argument("--resume", type=Path, metavar="FOLDER")
    args = parser.parse_args(argv)
    if args.capacity is None:
        args.capacity = max(args.tokens) * args.topk
    return args


def main() -> None:
    """Run as one of torchrun's processes."""
    args = parse()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    te_grouped_mlp.assert_active()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with common.determinism(asked=True):
            found, _ = train(args, device)
        if dist.get_rank() == 0:
            print(f"hash {found} ({te_grouped_mlp.explain()})")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
