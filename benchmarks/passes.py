"""Compare passes of one sample, mapped over the batch, with passes of all samples at once.

    python benchmarks/passes.py [--models bert vit gpt2 encoder resnet] [--batch 32] [--rounds 9]
                                [--device cpu|cuda] [--threads 2] [--quick] [--out FILE]

plain           forward and backward pass of the summed losses, as in plain SGD
mapped          one sample's passes, mapped over the batch (gradients/mapped.py), the default for
                models that are not built of known layers
at once         the passes of independence="tested", which hold all samples
... with sums   with each sample's norm and one weighted sum, as a step needs them

The ways take turns in one process. Ratios are to `plain` within a round. "first" is the time to the
first pass, which for "mapped" and "at once" includes the plan. BERT, ViT and GPT-2 are
those of transformers, small and with random parameters; `pip install transformers` adds them, and
without it the file has the reason. Dropout is off. Writes benchmarks/results/passes.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from itertools import pairwise
from typing import Any

import torch
from _measure import Loop, arguments, interleaved, prepare_torch, ratios, reason, save, spread
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from evenclip.gradients import AnyTape, plan

WAYS = ("plain", "mapped", "at once", "mapped, with sums", "at once, with sums")
_CLASSES, _TOKENS, _VOCABULARY = 10, 64, 1000


class Logits(nn.Module):
    """A model of transformers, which returns the logits alone.

    Models of text are given a mask of padding, in a form in which transformers has no branch on its
    values, because passes with such a branch cannot be mapped.
    """

    def __init__(self, model: nn.Module, mask: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.mask = model, mask

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        given = {} if self.mask is None else {"attention_mask": self.mask(x)}
        return self.model(x, **given).logits


def padding(x: Tensor) -> Tensor:
    """Return 0 where a text is padded.  # [sample, position]"""
    return (x != 0).long()


def padding_of_all(x: Tensor) -> Tensor:
    """Return False where a text is padded, the same for all queries.  # [sample, 1, 1, position]"""
    return (x != 0)[:, None, None, :]


def bert() -> nn.Module:
    """Return BERT with 4 layers of width 256."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=_VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=_CLASSES,
    )  # fmt: skip
    return Logits(BertForSequenceClassification(config), padding_of_all)


def vit() -> nn.Module:
    """Return ViT with 6 layers of width 192, on 32×32 images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
        intermediate_size=768, num_labels=_CLASSES,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config))


def gpt2() -> nn.Module:
    """Return GPT-2 with 4 layers of width 256."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        attn_implementation="eager", vocab_size=_VOCABULARY, n_positions=_TOKENS, n_embd=256,
        n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=_CLASSES, pad_token_id=0,
    )  # fmt: skip
    return Logits(GPT2ForSequenceClassification(config), padding)


class Encoder(nn.Module):
    """Four `nn.TransformerEncoderLayer` of width 256, on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 256)
        self.position = nn.Parameter(0.02 * torch.randn(_TOKENS, 256))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(256, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


class Block(nn.Module):
    """The basic block of a residual network, with GroupNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, outputs) for _ in range(2))
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs)
            )
        )

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = relu(self.norms[0](self.first(x)), inplace=True)
        return relu(self.norms[1](self.second(y)) + self.shortcut(x), inplace=True)


def resnet() -> nn.Module:
    """Return ResNet-18 with GroupNorm; for small images, it starts with 3×3 and does not pool."""
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Block(inputs if i == 0 else outputs, outputs, 2 if i == 0 and outputs > 64 else 1)
        for inputs, outputs in pairwise(widths)
        for i in range(2)
    ]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, _CLASSES)]
    return nn.Sequential(*stem, *blocks, *head)


def tokens(n: int) -> Tensor:
    return torch.randint(1, _VOCABULARY, (n, _TOKENS))  # 0 fills up shorter texts


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32)


@dataclass(frozen=True)
class Case:
    """A model and what it reads."""

    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


CASES = {
    "bert": Case("BERT, 4 × 256, 64 tokens", bert, tokens),
    "vit": Case("ViT, 6 × 192, 65 patches", vit, images),
    "gpt2": Case("GPT-2, 4 × 256, 64 tokens", gpt2, tokens),
    "encoder": Case("nn.TransformerEncoderLayer, 4 × 256, 64 tokens", Encoder, tokens),
    "resnet": Case("ResNet-18, GroupNorm, 32×32", resnet, images),
}


@dataclass(frozen=True)
class Setup:
    """A model, its batch and its tapes."""

    case: Case
    batch: int
    device: str

    @cached_property
    def given(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, inputs and targets."""
        torch.manual_seed(0)
        model, x = self.case.make().to(self.device), self.case.inputs(self.batch)
        y = torch.randint(_CLASSES, (self.batch,), device=self.device)
        return model, x.to(self.device), y

    @cached_property
    def mapped(self) -> AnyTape:
        """The tape that gives the model one sample."""
        return self._planned(None, "by construction")

    @cached_property
    def at_once(self) -> AnyTape:
        """The tape that gives the model all samples."""
        return self._planned("tested", "tested")

    def _planned(self, independence: str | None, expected: str) -> AnyTape:
        model, x, y = self.given
        tape = plan(model, cross_entropy, x, y, independence)
        if tape.independence.value != expected:
            raise ValueError(f"The samples are independent {tape.independence.value}.")
        return tape


def loop(way: str, setup: Setup) -> Loop:
    """Take the passes of one batch per item."""
    model, x, y = setup.given
    if way == "plain":
        while True:
            model.zero_grad(set_to_none=True)
            cross_entropy(model(x), y, reduction="sum").backward()
            yield None
    tape = setup.mapped if way.startswith("mapped") else setup.at_once
    weights = torch.rand(setup.batch, dtype=torch.float64, device=setup.device)
    while True:
        with tape.recording():
            gradients = tape(x, y)
            if way.endswith("sums"):
                gradients.norms()
                gradients.weighted_sum(weights)
        yield None


def measured(name: str, batch: int, device: str, rounds: int, turn: float) -> dict[str, Any]:
    """Measure one model."""
    case = CASES[name]
    row = {"model": name, "title": case.title, "batch": batch}
    try:
        parameters = sum(p.numel() for p in case.make().parameters())
    except ImportError as error:
        return {**row, "ms": {}, "ratio": {}, "failed": dict.fromkeys(WAYS, reason(error))}
    setup = Setup(case, batch, device)
    makes = {way: partial(loop, way, setup) for way in WAYS}
    timed = interleaved(makes, rounds=rounds, seconds=turn, device=device)
    plain = timed.seconds["plain"]
    return {
        **row,
        "parameters": parameters,
        "ms": {way: 1e3 * spread(times)[1] for way, times in timed.seconds.items()},
        "ratio": {way: spread(ratios(times, plain)) for way, times in timed.seconds.items()},
        "first": timed.first,
        "failed": timed.failed,
        "rounds": timed.seconds,
    }


def table(row: dict[str, Any]) -> str:
    """Format one model's times at 80 columns."""
    lines = [f"{row['title']}, batch {row['batch']}"]
    for way in WAYS:
        if way in row["failed"]:
            lines.append(f"  {way:<22} {row['failed'][way]}"[:80])
        else:
            low, middle, high = row["ratio"][way]
            lines.append(
                f"  {way:<22}{row['ms'][way]:>10.1f} ms{middle:>8.2f} ({low:.2f} to {high:.2f})"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure every model, print and save."""
    parser = arguments(__doc__ or "", rounds=9)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--note", help="what else the machine did, for the file")
    given = parser.parse_args()
    prepare_torch(given.threads, given.device, tf32=False)
    rounds, turn = (min(given.rounds, 3), 0.1) if given.quick else (given.rounds, 0.5)
    rows = []
    for name in given.models:
        rows.append(measured(name, given.batch, given.device, rounds, turn))
        print(table(rows[-1]) + "\n", flush=True)
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = None
    save("passes", given, {"transformers": version, "rows": rows})


if __name__ == "__main__":
    main()
