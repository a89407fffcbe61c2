"""Opacus's optimizer with a rule of this package."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from torch import Tensor

from evenclip.mechanism import Ledger, Mechanism, Release, joint_multiplier
from evenclip.mechanism.entry import Parent
from evenclip.mechanism.generators import fill_generators
from evenclip.mechanism.noise import Noise
from evenclip.mechanism.rounding import sum_rounding
from evenclip.mechanism.words import KEY_BYTES
from evenclip.opacus.accountant import LedgerAccountant
from evenclip.opacus.checks import (
    accountant_of,
    check_loader,
    check_optimizer,
    check_rule,
    warn_if_less_noise,
)
from evenclip.opacus.clipping import Clipper, modules_with, refuse_autocast, take_samples
from evenclip.opacus.draws import Batches, Draws
from evenclip.opacus.leftovers import clear_parameters
from evenclip.rules import Constants, Rule

__all__ = ["EvenOptimizer", "even"]

_KEY = "evenclip"  # key of the rule's state in a checkpoint of the optimizer


def even(
    optimizer: DPOptimizer, rule: Rule, engine: PrivacyEngine, data_loader: DPDataLoader
) -> EvenOptimizer:
    """Return an optimizer that weights samples by `rule`, from what Opacus's `make_private` made.

    Noise and bound are those of the rule; `noise_multiplier` and `max_grad_norm` of `make_private`
    are no longer used. A rule that counts releases its count as well, so ε is larger than that of
    Opacus for the same σ.

    Engine and data loader are changed in place: the loader draws its batches with exact coins, and
    `engine.get_epsilon` computes ε from the ledger of the optimizer. Create schedulers, step hooks
    and `BatchMemoryManager` afterwards, with the returned optimizer.

    Args:
        optimizer: the optimizer of `make_private`, for flat clipping on one device.
        rule: a rule that uses no group labels and clips with the state of the last step, such as
            `DPSGDGlobalAdapt`.
        engine: the engine that made it.
        data_loader: the data loader of `make_private`, with Poisson sampling.

    Raises:
        TypeError: if optimizer or data loader are of another type.
        ValueError: if the rule, the model or the engine cannot be used; the message says why.
    """
    check_rule(rule)
    check_optimizer(optimizer)
    check_loader(data_loader)
    warn_if_less_noise(optimizer.noise_multiplier, rule)
    accountant = accountant_of(engine)
    sampler = data_loader.batch_sampler
    B = float(optimizer.expected_batch_size)
    batches = Batches(sampler.num_samples, sampler.sample_rate, sampler.steps, B)
    even_optimizer = EvenOptimizer(optimizer, rule, batches, accountant)
    modules = modules_with(optimizer.params)
    refuse_autocast(modules)
    even_optimizer.neighbours = [p for module in modules for p in module.parameters()]
    engine.accountant = accountant
    # A step of the old optimizer would not be in the ledger; this hook raises.
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(batches.q))
    # DataLoader forbids assignment, because an iterator that exists keeps the old sampler. Its
    # batches are not released: they were not drawn by the new one.
    vars(data_loader)["batch_sampler"] = batches
    return even_optimizer


class EvenOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus has no types
    """A `DPOptimizer` with the weights and the noise of a rule.

    `even` and `EvenPrivacyEngine` create it. Per-sample gradients are deleted as soon as they are
    summed, and the sums as soon as they are released. A copy draws its own noise and writes the
    same ledger.

    Attributes:
        rule: the rule. A noise scheduler of Opacus scales all its noise, including the count's.
        rule_state: the rule's public state, Z of the next step; part of every checkpoint.
        ledger: every release so far, and those of the engine's other optimizers.
        noise_multiplier: the joint multiplier of all releases of one step.
        max_grad_norm: S; fixed by the rule.
        neighbours: all parameters of the modules that the optimizer trains a part of. Opacus leaves
            gradients in these too, and every step removes them.
    """

    def __init__(
        self, optimizer: DPOptimizer, rule: Rule, batches: Batches, accountant: LedgerAccountant
    ) -> None:
        size = sum(p.numel() for p in optimizer.params)
        constants = Constants(parameters=size, B=float(optimizer.expected_batch_size), q=batches.q)
        self._clipper = Clipper(Mechanism(rule, constants, rounding=sum_rounding(batches.most)))
        self.neighbours: list[Tensor] = []
        self._written: list[Tensor] = []  # whose `p.grad` is of the last release
        self._batches, self._accountant = batches, accountant
        self._draws: Draws[Noise] | None = None
        self._drawn_for: tuple[dict[str, int], torch.device] | None = None
        self._parent: Parent | None = None  # the place of a loaded checkpoint
        batches.on_pass = self._start_batch
        DPOptimizer.__init__(
            self,
            optimizer.original_optimizer,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            expected_batch_size=optimizer.expected_batch_size,
            loss_reduction=optimizer.loss_reduction,
        )

    @property
    def rule(self) -> Rule:
        """The rule."""
        return self._clipper.mechanism.rule

    @property
    def rule_state(self) -> Tensor:
        """The rule's state for the next step; public."""
        return self._clipper.state.clone()

    @property
    def ledger(self) -> Ledger:
        """Every release so far; public."""
        return self._accountant.ledger

    @property
    def noise_multiplier(self) -> float:
        """(Σ m_j⁻²)^(-1/2) over the releases of one step."""
        return joint_multiplier(self._clipper.multipliers.values())

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        if value != self.noise_multiplier:
            rule = self.rule.scaled(value / self.noise_multiplier)
            self._clipper.mechanism = replace(self._clipper.mechanism, rule=rule)

    @property
    def max_grad_norm(self) -> float:
        """S."""
        return self._clipper.sensitivity

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if value != self.max_grad_norm:
            raise ValueError(
                f"max_grad_norm cannot become {value}: it is {self.max_grad_norm}, "
                f"{self.rule.name}'s sensitivity. To change the step size, change the learning "
                "rate."
            )

    @property
    def accumulated_iterations(self) -> int:
        """Return 1: a Poisson batch is one batch, also in several physical batches."""
        return 1

    # --- a step, in this order ---

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Prepare the wrapped optimizer's step; return whether to take it.

        Nothing of the records stays in the parameters, also if this fails.
        """
        del closure
        self._written = []
        try:
            return self._released()
        finally:
            self._clear()

    def _released(self) -> bool:
        """Take in a physical batch; return whether the logical batch is complete and released."""
        if not self.params:  # all parameters are frozen, so nothing is released
            return True
        self.clip_and_accumulate()
        self._is_last_step_skipped = bool(self._check_skip_next_step())
        if self._is_last_step_skipped:
            return False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True

    def _clear(self) -> None:
        """Delete what the backward pass left in all parameters, those that were frozen since too.

        Only a `p.grad` that was released has noise; any other is that of the backward pass.
        """
        own = [p for group in self.param_groups for p in group["params"]]
        everything = [*own, *self.neighbours]
        clear_parameters(everything)
        released = {id(p) for p in self._written}
        for p in everything:
            if id(p) not in released:
                p.grad = None

    def clip_and_accumulate(self) -> None:
        """Add a physical batch to the logical batch, and delete its per-sample gradients."""
        self._clipper.add(take_samples(self.params))

    def add_noise(self) -> None:
        """Release the logical batch, and write the released sum into `p.grad`.

        The private sums are deleted, also if this fails.
        """
        try:
            self._batches.spend(self._clipper.records)
            noisy = self._clipper.release(self.expected_batch_size, self._release())
        finally:
            self._clipper.drop()
            self._fill_generators()
        parts = torch.split(noisy, [p.numel() for p in self.params])
        for p, part in zip(self.params, parts, strict=True):
            p.grad = part.to(device=p.device, dtype=p.dtype).view_as(p)
        self._written = self.params

    def _start_batch(self) -> None:
        """Drop what a `BatchMemoryManager` loop left behind that ended within a logical batch."""
        self._clipper.drop()
        self._step_skip_queue.clear()
        self._fill_generators()

    def _fill_generators(self) -> None:
        """Fill torch's generators, which dropout uses, with words of the operating system.

        An attacker who knows the masks of a batch sees one record move the masks of all others.
        """
        cuda = bool(self.params) and self.params[0].is_cuda
        fill_generators(os.urandom(KEY_BYTES), cuda=cuda)

    def _release(self) -> Release:
        """Write this step into the ledger, and draw its noise."""
        clipper, batches = self._clipper, self._batches
        lengths = clipper.mechanism.statistics | {"gradient": sum(p.numel() for p in self.params)}
        sizes = {name: lengths[name] for name in clipper.multipliers}
        draws = self._source(sizes, self.params[0].device)
        # A draw is taken when it is in the ledger. An interrupt between the two leaves a step that
        # was not drawn, and the next draw follows it; the other order would leave a gap.
        while draws.count < self.ledger.end_of(draws.run):
            draws.take()
        index = draws.count
        self.ledger.write(
            batches.q, clipper.multipliers, sizes, batches.tau, draws.run, index, draws.parent
        )
        draws.take()
        return Release(draws.source.of(index))

    def _source(self, sizes: dict[str, int], device: torch.device) -> Draws[Noise]:
        """Return the source of noise of these sizes, another one if they have changed."""
        if self._draws is None or self._drawn_for != (sizes, device):
            self._draws = Draws(partial(Noise, sizes=sizes, device=device), self._place)
            self._drawn_for = sizes, device
        return self._draws

    # --- checkpoints and copies ---

    @property
    def _place(self) -> Parent | None:
        """The run and number of draws that another key continues."""
        return self._parent if self._draws is None else self._draws.place

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer and of the rule, and the ledger."""
        saved = {
            "rule": self.rule.name,
            "state": self._clipper.state.clone(),
            "t": self._clipper.t,
            "place": self._place,
            "ledger": self.ledger.to_json(),
        }
        return {**self.original_optimizer.state_dict(), _KEY: saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the wrapped optimizer and of the rule; draw noise with another key.

        The steps of the checkpoint are added to the ledger; none is counted twice.

        Raises:
            ValueError: if the checkpoint is of another rule or has no state of a rule.
        """
        wrapped = dict(state_dict)
        saved = wrapped.pop(_KEY, None)
        if saved is None and self._clipper.state.numel():
            raise ValueError(
                f"This checkpoint has no state of a rule, and {self.rule.name} needs its Z; load a "
                "checkpoint that this optimizer saved."
            )
        if saved is not None and saved["rule"] != self.rule.name:
            raise ValueError(
                f"This checkpoint is of {saved['rule']} and the optimizer has {self.rule.name}; "
                "use the same rule."
            )
        self.original_optimizer.load_state_dict(wrapped)
        self._clipper.drop()
        if saved is not None:
            self._accountant.add(Ledger.from_json(saved["ledger"]))
            self._clipper.state = saved["state"].to(self._clipper.state).clone()
            self._clipper.t = saved["t"]
            self._draws, self._parent = None, saved["place"]

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes; torch's optimizers would leave out those of this class."""
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> EvenOptimizer:
        """Copy the optimizer; the copy writes the same ledger and spends the same batches."""
        memo |= {id(shared): shared for shared in (self._accountant, self._batches)}
        copied = memo[id(self)] = EvenOptimizer.__new__(EvenOptimizer)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied
