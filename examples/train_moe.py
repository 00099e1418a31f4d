# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts language model, on text that this file makes; CPU or GPU.

    python examples/train_moe.py --plot loss.svg
    python examples/train_moe.py --deterministic
    python examples/train_moe.py --deterministic --save half.pt --save-at 50
    python examples/train_moe.py --deterministic --resume half.pt

The last three end in the same hash of all weights and optimizer states.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch

import te_grouped_mlp

WORDS = {
    "who": ("the router", "an expert", "a token", "the optimizer", "every gradient"),
    "does": ("finds", "scales", "splits", "rounds", "sums"),
    "what": ("its rows", "two experts", "a block", "the padding", "one tile"),
    "when": ("at last", "in order", "twice", "before the step", "without a sound"),
}


def text(seed: int, sentences: int) -> str:
    """Return sentences of a small grammar."""
    draw = random.Random(seed)
    return "".join(
        f"{' '.join(draw.choice(choices) for choices in WORDS.values())}.\n"
        for _ in range(sentences)
    )


class Layer(torch.nn.Module):
    """Causal attention with one head, then the experts that the router chooses."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.topk, hidden = args.topk, args.hidden
        self.norm1 = torch.nn.RMSNorm(hidden, device=device)
        self.norm2 = torch.nn.RMSNorm(hidden, device=device)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False, device=device)
        self.out = torch.nn.Linear(hidden, hidden, bias=False, device=device)
        self.router = torch.nn.Linear(hidden, args.experts, bias=False, device=device)
        self.experts = common.Experts(args.experts, hidden, args.ffn, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, hidden)."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        length = x.shape[1]
        scores = q @ k.mT / x.shape[2] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        x = x + self.out(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
        return x + self._mixture(self.norm2(x).flatten(0, 1)).view_as(x)

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        """Sort the choices by expert, run the experts, and sum each token's results."""
        tokens, hidden = x.shape
        probs, expert = self.router(x).softmax(-1).topk(self.topk)
        order = expert.flatten().argsort(stable=True)
        each = x.bfloat16()[:, None].expand(tokens, self.topk, hidden).reshape(-1, hidden)
        counts = torch.nn.functional.one_hot(expert.flatten(), self.router.out_features).sum(0)
        y = self.experts(each[order], probs.flatten()[order], counts)
        back = torch.empty_like(y).index_copy(0, order, y)
        return back.view(tokens, self.topk, hidden).float().sum(1)


class Model(torch.nn.Module):
    """Characters to the logits of the next one."""

    def __init__(self, characters: int, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(characters, args.hidden, device=device)
        self.position = torch.nn.Embedding(args.length, args.hidden, device=device)
        self.layers = torch.nn.ModuleList(Layer(args, device) for _ in range(args.layers))
        self.head = torch.nn.Linear(args.hidden, characters, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, characters)."""
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(args: argparse.Namespace, device: torch.device) -> tuple[str, list[float]]:
    """Train, and return a hash of the weights and the optimizer's states, and the losses."""
    content = text(args.seed, sentences=400)
    characters = sorted(set(content))
    ids = torch.tensor([characters.index(each) for each in content])
    torch.manual_seed(args.seed)
    model = Model(len(characters), args, device)
    optimizer = torch.optim.Adam(model.named_parameters(), lr=args.lr)
    first, losses = 0, []
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, losses = state["step"], state["losses"]
    for step in steps(first, args.steps, losses):
        # The batch follows from the step's number, so a resumed run sees the same ones.
        draw = torch.Generator().manual_seed(args.seed + step)
        begin = torch.randint(len(ids) - args.length, (args.batch,), generator=draw)
        window = ids[begin[:, None] + torch.arange(args.length + 1)].to(device)
        logits = model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if args.save and step + 1 == args.save_at:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            common.save({**state, "step": step + 1, "losses": losses}, args.save)
    te_grouped_mlp.assert_fused()
    return te_grouped_mlp.digest(common.everything(model, optimizer)), losses


def steps(first: int, last: int, losses: list[float]) -> Iterator[int]:
    """Yield the numbers of the steps, and show how far they are: a bar on a terminal, or lines."""
    try:
        from rich.progress import Progress
    except ImportError:
        Progress = None
    if Progress is not None and sys.stderr.isatty():
        with Progress() as bar:
            task = bar.add_task("train", total=last, completed=first)
            for step in range(first, last):
                yield step
                bar.update(task, advance=1, description=f"loss {losses[-1]:.3f}")
        return
    for step in range(first, last):
        yield step
        if step % max(1, last // 10) == 0 or step == last - 1:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)


def plot(losses: list[float], path: Path) -> None:
    """Draw the losses as SVG or PNG, as the name ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes: Any = figure.add_subplot(xlabel="step", ylabel="cross entropy, nats per character")
    axes.plot(losses)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    sizes = {"steps": 100, "seed": 0, "batch": 8, "length": 48, "layers": 1, "experts": 4}
    for name, value in {**sizes, "topk": 2, "hidden": 128, "ffn": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="default: %(default)s")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".svg or .png; needs matplotlib")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--save-at", type=int, default=50, metavar="STEP")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main() -> None:
    """Train, and say what ran."""
    args = parse()
    te_grouped_mlp.assert_active()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with common.determinism(asked=args.deterministic):
        found, losses = train(args, device)
    if args.plot:
        plot(losses, args.plot)
    print(te_grouped_mlp.explain())
    if args.deterministic:
        print(f"hash {found}")


if __name__ == "__main__":
    main()
