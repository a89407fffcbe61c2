"""Plant faults in a copy of the package, one at a time, and check that the tests of each fail.

    python tests/planted.py           all faults, two at a time
    python tests/planted.py NAME...    those whose name contains one of the words
    python tests/planted.py --list    names and what is wrong

A fault replaces a text that occurs exactly once in one file. It is caught if its tests fail: not if
they cannot be imported or collected, and not if none of them runs. Exit status 1 if a fault is
missed or cannot be planted.

To add one: name the file by the end of its path, copy a text that occurs once, and name the tests
that should fail.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300.0  # seconds for the tests of one fault
FAILED = 1  # pytest's exit status when tests ran and some failed


@dataclass(frozen=True)
class Fault:
    """One possible mistake in the package.

    Attributes:
        name: unique, for the command line.
        wrong: what is wrong, in a sentence.
        file: the end of the file's path below src/evenclip.
        old: text that occurs exactly once in it.
        new: what takes its place.
        tests: pytest node ids below tests/, of which at least one must fail.
    """

    name: str
    wrong: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


class NotPlanted(Exception):  # noqa: N818
    """The file or the text of a fault does not occur exactly once."""


EVERY_RULE, DPSGD_F, ADAPT = (
    "rules/test_every_rule.py",
    "rules/test_dpsgd_f.py",
    "rules/test_dpsgd_global_adapt.py",
)
LAYERS, ROUNDING, MODELS = (
    "gradients/test_layers.py",
    "gradients/test_rounding.py",
    "gradients/test_whole_models.py",
)
LEDGERS, CORRECTION = "mechanism/test_ledger.py", "mechanism/test_correction.py"
GRID, NOISES, WORDS = (
    "mechanism/test_grid.py",
    "mechanism/test_noise.py",
    "mechanism/test_words.py",
)
DRAWS, SEEDS = "attacks/test_reused_draws.py", "attacks/test_shared_seeds.py"
COPIED, PATCHED = "attacks/test_copied_keys.py", "attacks/test_patched_torch.py"
ANOTHER, BFLOAT16 = "attacks/test_steps_of_another_run.py", "attacks/test_bfloat16_in_opacus.py"
ACCOUNTING, CALIBRATION, RELEASE, SAMPLING = (
    "mechanism/test_accounting.py",
    "mechanism/test_calibration.py",
    "mechanism/test_release.py",
    "mechanism/test_sampling.py",
)
RESUME, RESULT, TABLE = "training/test_resume.py", "training/test_result.py", "data/test_table.py"
FILES = "cli/test_epsilon_files.py"
DECLARATIONS = "attacks/test_lost_declarations.py"
PLACES, MIXING = "attacks/test_places_of_state.py", "attacks/test_mixing_samples.py"
STATISTICS, METRICS, TERMS = (
    "audit/test_statistics.py",
    "audit/test_metrics.py",
    "audit/test_decomposition.py",
)

CONTENTS, UNCHANGED = "training/test_contents.py", "training/test_unchanged.py"
KEYED, BRANCHES = "training/test_keys.py", "training/test_branches.py"

RULES = (
    Fault(
        "dpsgd-sensitivity",
        "DPSGD adds noise for half of what one sample can add.",
        "rules/dpsgd.py",
        "        return self.C0\n",
        "        return self.C0 / 2\n",
        (f"{EVERY_RULE}::test_honest_rules_are_never_held", "rules/test_dpsgd.py::test_step"),
    ),
    Fault(
        "dpsgd-weight",
        "DPSGD lets a gradient be a tenth longer than C0.",
        "rules/dpsgd.py",
        "return (self.C0 / norm).clamp(max=1.0)",
        "return (1.1 * self.C0 / norm).clamp(max=1.0)",
        (f"{EVERY_RULE}::test_honest_rules_are_never_held", "rules/test_dpsgd.py::test_weights"),
    ),
    Fault(
        "dpsgd-f-present",
        "The sensitivity is the smallest bound of a group and not the largest.",
        "rules/dpsgd_f.py",
        "return now.max()",
        "return now.min()",
        (f"{EVERY_RULE}::test_honest_rules_are_never_held", f"{DPSGD_F}::test_steps"),
    ),
    Fault(
        "dpsgd-f-two-counts",
        "A sample is in two of the 2K counts, which so have sensitivity √2.",
        "rules/dpsgd_f.py",
        "== place.unsqueeze(-1)).to(",
        "// 2 == group.unsqueeze(-1)).to(",
        (f"{DPSGD_F}::test_each_sample_is_in_exactly_one_of_the_2K_counts",),
    ),
    Fault(
        "dpsgd-f-boundary",
        "A norm of exactly C0 is counted as above it.",
        "rules/dpsgd_f.py",
        "place = 2 * group + (norm > self.C0)",
        "place = 2 * group + (norm >= self.C0)",
        (
            f"{DPSGD_F}::test_each_sample_is_in_exactly_one_of_the_2K_counts",
            f"{DPSGD_F}::test_steps",
        ),
    ),
    Fault(
        "dpsgd-f-negative-counts",
        "Noisy counts below 0 are used as they are.",
        "rules/dpsgd_f.py",
        "noisy.floor().clamp(min=0)",
        "noisy.floor()",
        (
            f"{DPSGD_F}::test_repairs_by_hand",
            f"{DPSGD_F}::test_bounds_lie_between_C0_and_1_plus_K_times_it_and_are_twice_it_on_average",
        ),
    ),
    Fault(
        "global-keeps-large",
        "DPSGD-Global scales gradients above Z as well instead of dropping them.",
        "rules/dpsgd_global.py",
        "return (norm <= self.Z).to(norm.dtype) * (self.C0 / self.Z)",
        "return (norm <= 2 * self.Z).to(norm.dtype) * (self.C0 / self.Z)",
        (
            f"{EVERY_RULE}::test_honest_rules_are_never_held",
            "rules/test_dpsgd_global.py::test_weights",
        ),
    ),
    Fault(
        "adapt-divides-by-batch",
        "Z moves by twice the share of large norms.",
        "rules/dpsgd_global_adapt.py",
        "alpha=-1 / B)",
        "alpha=-2 / B)",
        (
            f"{ADAPT}::test_steps",
            f"{ADAPT}::test_Z_settles_where_a_fraction_eta_Z_of_the_norms_is_above_tau_Z",
        ),
    ),
    Fault(
        "adapt-weight-minimum",
        "DPSGD-Global-Adapt divides by the smaller of Z and the norm.",
        "rules/dpsgd_global_adapt.py",
        "torch.maximum(norm, now)",
        "torch.minimum(norm, now)",
        (f"{ADAPT}::test_weights", f"{EVERY_RULE}::test_honest_rules_are_never_held"),
    ),
    Fault(
        "adapt-threshold",
        "Norms are counted above Z and not above τZ.",
        "rules/dpsgd_global_adapt.py",
        "return norm > self.tau * state",
        "return norm > state",
        (f"{ADAPT}::test_count_is_strict_at_tau_Z", f"{ADAPT}::test_steps"),
    ),
    Fault(
        "adapt-counts-without-noise",
        "The count gets the noise of the gradient and not ten times as much.",
        "rules/dpsgd_global_adapt.py",
        '"sigma_count", 10.0 * self.sigma)',
        '"sigma_count", self.sigma)',
        (f"{EVERY_RULE}::test_the_count_gets_ten_times_the_noise_unless_told",),
    ),
    Fault(
        "nonprivate-claims-epsilon",
        "Plain SGD claims to be sound.",
        "rules/nonprivate.py",
        "soundness: ClassVar[str] = NO_EPSILON",
        'soundness: ClassVar[str] = "sound"',
        (f"{EVERY_RULE}::test_soundness",),
    ),
    Fault(
        "multipliers-unbounded",
        "A rule without a bound writes its σ into the ledger.",
        "mechanism/mechanism.py",
        'return self.noise if self.rule.bounded else self.noise | {"gradient": 0.0}',
        "return self.noise",
        ("rules/test_fairlens.py::test_there_is_no_epsilon_anywhere",),
    ),
    Fault(
        "multipliers-without-count",
        "The count's noise is not among a rule's multipliers, so calibration forgets its cost.",
        "rules/rule.py",
        'counts = {} if counts is None else {"count": counts}',
        "counts = {}",
        (f"{EVERY_RULE}::test_multipliers_are_what_a_step_releases",),
    ),
    Fault(
        "scaled-gradient-only",
        "Scaling a rule's noise leaves the count's as it was.",
        "rules/rule.py",
        'noise = {"sigma": self.sigma * factor, "sigma_count": counts}',
        'noise = {"sigma": self.sigma * factor}',
        (f"{EVERY_RULE}::test_scaled_multiplies_all_noise_and_nothing_else",),
    ),
)

GRADIENTS = (
    Fault(
        "linear-no-bias-in-norm",
        "The norm of a linear layer of one position leaves the bias out.",
        "layers/linear.py",
        "return torch.addcmul(total, total, size) if self._bias else total * size",
        "return total * size",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "linear-no-bias-in-norm-of-positions",
        "The norm of a linear layer over positions leaves the bias out.",
        "layers/linear.py",
        "            total = total + sum_square_norms(self._delta)\n",
        "            pass\n",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "linear-no-bias-in-sum",
        "The sum over positions has no gradient of the bias.",
        "layers/linear.py",
        '            out["bias"] = weighted.sum(dim=0)\n',
        "            pass\n",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "linear-positions-apart",
        "Positions are taken as if their gradients were orthogonal: the cross terms of the Gram "
        "form are left out.",
        "layers/linear.py",
        "return ((a @ a.mT) * (delta @ delta.mT)).sum(dim=(1, 2)).clamp(min=0.0)",
        "return ((a @ a.mT) * (delta @ delta.mT)).diagonal(dim1=1, dim2=2).sum(dim=1)",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "linear-gram-in-float32",
        "The Gram form is computed in the layer's precision, where it cancels.",
        "layers/linear.py",
        "    a, delta = a.double(), delta.double()\n",
        "    a, delta = a.float(), delta.float()\n",
        (
            f"{ROUNDING}::test_the_gram_form_in_float32_is_too_small_and_ours_is_not",
            f"{LAYERS}::test_every_layer_with_a_formula",
        ),
    ),
    Fault(
        "linear-no-margin",
        "The norm of a sum over positions has no margin for the rounding of the batch's sum.",
        "layers/linear.py",
        "    return (norm + margin(T) * size).square()\n",
        "    return norm.square()\n",
        ("mechanism/test_rounding.py",),
    ),
    Fault(
        "linear-reduced-operands",
        "Operands of fewer bits are not allowed for in the norm.",
        "layers/linear.py",
        "(rounding(a, T) + 3 * operands(a)) * size",
        "rounding(a, T) * size",
        (f"{ROUNDING}::test_products_of_fewer_bits_are_accounted_for",),
    ),
    Fault(
        "quick-norm-underflow",
        "Squares of short δ are lost in float32.",
        "layers/linear.py",
        "_SHORTEST = 2.0**-50",
        "_SHORTEST = 0.0",
        (
            f"{ROUNDING}::test_a_quick_norm_is_never_too_small",
            f"{ROUNDING}::test_without_a_shortest_length_squares_would_be_lost",
        ),
    ),
    Fault(
        "linear-wrong-axis",
        "Gradients of positions are not added up for the bias: the first one stands for all.",
        "layers/linear.py",
        "return delta[:, 0] if delta.shape[1] == 1 else delta.sum(dim=1)",
        "return delta[:, 0]",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "convolution-no-stride",
        "Windows of a convolution are cut as if its stride were 1.",
        "layers/convolution.py",
        "[..., ::stride]",
        "[..., :size]",
        (
            f"{LAYERS}::test_every_way_through_a_convolution",
            f"{LAYERS}::test_every_layer_with_a_formula",
        ),
    ),
    Fault(
        "convolution-no-dilation",
        "Windows of a convolution are cut as if its kernel had no holes.",
        "layers/convolution.py",
        "(size - 1) * stride + 1, module.dilation[axis])",
        "(size - 1) * stride + 1, 1)",
        (
            f"{LAYERS}::test_every_way_through_a_convolution",
            f"{LAYERS}::test_every_layer_with_a_formula",
        ),
    ),
    Fault(
        "convolution-one-place-off",
        "Windows of a convolution begin one place too late.",
        "layers/convolution.py",
        "module, view = self.module, self.a\n",
        "module, view = self.module, self.a.roll(-1, dims=2)\n",
        (
            f"{LAYERS}::test_every_way_through_a_convolution",
            f"{LAYERS}::test_every_layer_with_a_formula",
        ),
    ),
    Fault(
        "convolution-sum-no-dilation",
        "The summed gradient of a convolution is taken as if its kernel had no holes.",
        "layers/convolution.py",
        "module.stride, none, module.dilation, False,",
        "module.stride, none, [1 for _ in none], False,",
        (
            f"{LAYERS}::test_every_way_through_a_convolution",
            f"{LAYERS}::test_every_layer_with_a_formula",
        ),
    ),
    Fault(
        "convolution-no-bias-in-norm",
        "The norm of a large convolution leaves the bias out.",
        "layers/convolution.py",
        "            total = total + sum_square_norms(shifts.delta.flatten(2).mT)\n",
        "            pass\n",
        (
            f"{LAYERS}::test_every_layer_with_a_formula",
            f"{LAYERS}::test_every_way_through_a_convolution",
        ),
    ),
    Fault(
        "convolution-one-group",
        "The norm of a convolution of groups is that of its last group.",
        "layers/convolution.py",
        "total = each.reshape(shifts.n, shifts.g).sum(dim=1)",
        "total = each.reshape(shifts.n, shifts.g)[:, -1]",
        (
            f"{LAYERS}::test_every_layer_with_a_formula",
            f"{LAYERS}::test_every_way_through_a_convolution",
        ),
    ),
    Fault(
        "convolution-padding",
        "Circular or reflected padding is taken for zeros.",
        "layers/convolution.py",
        'mode = "constant" if module.padding_mode == "zeros" else module.padding_mode\n',
        'mode = "constant"\n',
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "embedding-padding",
        "The padding token has a gradient.",
        "layers/embedding.py",
        "    if module.padding_idx is not None:\n",
        "    if False:\n",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "embedding-repetitions",
        "Tokens that occur several times in a sample are not added up before the norm.",
        "layers/embedding.py",
        "pairs, where = torch.unique(place, return_inverse=True)",
        "pairs, where = place, torch.arange(len(place), device=place.device)",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "layer-norm-positions",
        "LayerNorm's gradient is that of the first position.",
        "layers/normalisation.py",
        '"weight": (normal * delta).reshape(delta.shape[0], -1, *shape).sum(dim=1),',
        '"weight": (normal * delta).reshape(delta.shape[0], -1, *shape)[:, 0],',
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "group-norm-axis",
        "GroupNorm's bias is added up over the channels.",
        "layers/normalisation.py",
        '"bias": delta.reshape(n, c, -1).sum(dim=2),',
        '"bias": delta.reshape(n, c, -1).sum(dim=2).mean(dim=1, keepdim=True).expand(n, c),',
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "formed-ignores-weights",
        "Formed gradients are summed without their weights.",
        "layers/layer.py",
        "        total = torch.mv(flat.to(weights.dtype).T, weights)\n",
        "        total = flat.to(weights.dtype).sum(dim=0)\n",
        (f"{LAYERS}::test_every_layer_with_a_formula",),
    ),
    Fault(
        "masked-by-product",
        "Samples that are left out are multiplied by 0, which NaN survives.",
        "layers/layer.py",
        "return torch.where(keep.view(-1, *(1 for _ in x.shape[1:])), x, 0.0)",
        "return x * keep.view(-1, *(1 for _ in x.shape[1:]))",
        (
            "gradients/test_not_finite.py::test_a_sample_that_is_not_kept_contributes_exactly_nothing",
        ),
    ),
    Fault(
        "lstm-gates",
        "Two gates of an LSTM change places.",
        "layers/recurrent.py",
        "i, f, g, o = (u + v).chunk(4, dim=1)",
        "f, i, g, o = (u + v).chunk(4, dim=1)",
        ("gradients/test_recurrent.py::test_every_kind",),
    ),
    Fault(
        "gru-one-tap",
        "A GRU's recurrent weights get the δ of its input weights.",
        "layers/recurrent.py",
        "v = next(tap_deltas) if steps.taps == 2 else u",
        "v = (next(tap_deltas), u)[1] if steps.taps == 2 else u",
        ("gradients/test_recurrent.py::test_every_kind",),
    ),
    Fault(
        "shared-without-cross-terms",
        "Calls of a shared layer are measured apart, without their cross terms.",
        "gradients/per_sample.py",
        "            uses[full] = uses.get(full, 0) + 1\n",
        "            uses[full] = 1\n",
        (f"{MODELS}::test_gradients_are_those_of_each_sample_alone",),
    ),
    Fault(
        "plan-trusts-formulas",
        "A model is taken apart without comparing the result with autograd.",
        "gradients/plan.py",
        "    if not torch.allclose(each, expected, rtol=0.0, atol=off):\n",
        "    return True\n    if not torch.allclose(each, expected, rtol=0.0, atol=off):\n",
        (f"{MODELS}::test_a_layer_whose_formula_is_wrong_is_taken_as_a_whole",),
    ),
    Fault(
        "loss-of-the-batch",
        "A sample's loss is summed over its positions where it should be averaged.",
        "gradients/losses.py",
        "return values.mean(dim=1) if self._mean else values.sum(dim=1)",
        "return values.sum(dim=1)",
        ("gradients/test_losses.py::test_the_loss_of_a_sample_is_that_of_a_batch_of_one",),
    ),
    Fault(
        "fairlens-norm",
        "The norm of a shifted gradient leaves the product with the shift out.",
        "rules/fairlens.py",
        "square = own.square() + 2 * _inner(self._gradients, self._shift) + length.square()",
        "square = own.square() + length.square()",
        ("rules/test_fairlens.py::test_every_samples_gradient_is_its_own_and_the_regularisers",),
    ),
)

LEDGER = (
    Fault(
        "joint-multiplier-average",
        "The joint multiplier of several releases is the smallest of them.",
        "mechanism/entry.py",
        "return math.inf if precision == 0 else precision**-0.5",
        "return math.inf if precision == 0 else min(values)",
        (
            f"{RELEASE}::test_joint_multiplier_is_that_of_the_best_estimate",
            f"{ACCOUNTING}::test_the_published_epsilons_come_out",
        ),
    ),
    Fault(
        "joint-multiplier-clear",
        "A release in clear is left out of the joint multiplier.",
        "mechanism/entry.py",
        "values = [float(m) for m in multipliers]",
        "values = [float(m) for m in multipliers if m]",
        (
            f"{RELEASE}::test_joint_multiplier_at_the_ends",
            f"{ACCOUNTING}::test_a_ledger_that_is_not_private_has_no_epsilon",
        ),
    ),
    Fault(
        "ledger-integers",
        "Numbers go into the ledger as they are, and dp-accounting drops integers.",
        "mechanism/entry.py",
        "tuple((name, float(m)) for name, m in multipliers.items()),",
        "tuple(multipliers.items()),",
        (f"{RELEASE}::test_every_number_becomes_a_float_of_python",),
    ),
    Fault(
        "ledger-loses-steps",
        "A step that is like the one before it is not written.",
        "mechanism/ledger.py",
        "steps=entries[-1].steps + entry.steps)",
        "steps=entries[-1].steps)",
        (f"{RELEASE}::test_equal_steps_in_a_row_are_one_entry",),
    ),
    Fault(
        "ledger-not-poisson",
        "Batches that are no Poisson samples count as private.",
        "mechanism/entry.py",
        "return self.q is not None and self.joint > 0",
        "return self.joint > 0",
        (f"{RELEASE}::test_private_only_with_poisson_batches_and_noise_on_everything",),
    ),
    Fault(
        "release-half-the-noise",
        "A release adds half of the noise that the ledger claims.",
        "mechanism/grid.py",
        "    ratio = std / H\n",
        "    ratio = std / H / 2\n",
        (
            f"{RELEASE}::test_released_values_have_the_spread_that_the_ledger_claims",
            f"{GRID}::test_published_is_the_noisy_integer_rounded_to_the_coarse_grid",
        ),
    ),
    Fault(
        "release-noise-twice",
        "The noise of a release can be used again.",
        "mechanism/release.py",
        "fresh, total = self._noise.pop(name), total",
        "fresh, total = next(iter(self._noise.values())), total",
        (f"{RELEASE}::test_a_name_without_noise_is_refused",),
    ),
    Fault(
        "release-float-noise",
        "The sum and the noise are added in floating point.",
        "mechanism/grid.py",
        "    return noisy.floor_().add_(hi).mul_(H)\n",
        "    return noisy.sub_(0.5).add_(hi).mul_(H)\n",
        (
            "attacks/test_float_noise.py",
            f"{GRID}::test_published_is_the_noisy_integer_rounded_to_the_coarse_grid",
        ),
    ),
    Fault(
        "release-one-number-for-all",
        "One number of noise is added to a whole sum.",
        "mechanism/grid.py",
        "    if z.shape != total.shape:\n",
        "    if False:\n",
        (
            f"{GRID}::test_noise_of_another_length_is_refused",
            f"{RELEASE}::test_one_number_of_noise_for_each_number_released",
        ),
    ),
    Fault(
        "release-same-name-again",
        "A name is released a second time.",
        "mechanism/release.py",
        "        if name in self._released:\n",
        "        if False:\n",
        (f"{RELEASE}::test_each_name_is_released_once_even_in_clear",),
    ),
    Fault(
        "release-grid-of-a-part",
        "A process takes h for its own part of a release.",
        "mechanism/release.py",
        "Grid.of(sensitivity, multiplier, value.numel(), rounding)",
        "Grid.of(sensitivity, multiplier, total.numel(), rounding)",
        (f"{RELEASE}::test_a_part_has_the_grids_and_the_noise_of_the_whole",),
    ),
    Fault(
        "release-without-rounding",
        "The noise of a release leaves the rounding of the sum out.",
        "mechanism/release.py",
        "Grid.of(sensitivity, multiplier, value.numel(), rounding)",
        "Grid.of(sensitivity, multiplier, value.numel(), 0.0)",
        (
            f"{RELEASE}::test_the_standard_deviation_is_rounded_up_from_sensitivity_times_multiplier",
        ),
    ),
    Fault(
        "grid-without-h",
        "The noise leaves the rounding to the fine grid out.",
        "mechanism/grid.py",
        "(S * (1 + rounding) + fine * root)",
        "(S * (1 + rounding))",
        (f"{GRID}::test_the_grids_are_as_documented",),
    ),
    Fault(
        "grid-rounds-down",
        "The standard deviation of the noise is rounded to the nearest.",
        "mechanism/grid.py",
        "(multiplier * (1 + 2.0**-48))",
        "multiplier",
        (f"{GRID}::test_the_grids_are_as_documented",),
    ),
    Fault(
        "grid-too-fine",
        "Cells are half as wide as the sampler's bound allows.",
        "mechanism/grid.py",
        "power_below(std * 0.125)",
        "power_below(std * 0.0625)",
        (
            f"{GRID}::test_the_grids_are_as_documented",
            "mechanism/test_noise.py::test_the_constants_of_the_bound",
        ),
    ),
    Fault(
        "grid-fine-without-size",
        "The fine grid does not depend on how many numbers a release has.",
        "mechanism/grid.py",
        "fine = power_below(S * min(_FINE / root, multiplier / 32))",
        "fine = power_below(S * min(_FINE, multiplier / 32))",
        (f"{GRID}::test_the_grids_are_as_documented",),
    ),
    Fault(
        "grid-no-bound-on-k",
        "A sum that is not finite is released unchanged.",
        "mechanism/grid.py",
        ".nan_to_num_(nan=0.0).clamp(-_MOST, _MOST)",
        "",
        (
            f"{RELEASE}::test_a_sum_that_is_not_finite_shows_in_no_other_number",
            f"{GRID}::test_the_bound_on_k_is_a_projection",
        ),
    ),
    Fault(
        "rounding-half",
        "ρ bounds the rounding of one of two neighbours.",
        "mechanism/rounding.py",
        "    return 2 * records * bound * (1 + 2.0**-10) + 2.0**-45\n",
        "    return records * bound * (1 + 2.0**-10)\n",
        ("mechanism/test_rounding.py",),
    ),
    Fault(
        "rounding-without-cancelling",
        "Layers with positions have the ρ of the others.",
        "mechanism/rounding.py",
        "    if cancelling:\n",
        "    if False:\n",
        ("mechanism/test_rounding.py",),
    ),
    Fault(
        "rounding-mean-batch",
        "N is the mean size of a batch.",
        "mechanism/rounding.py",
        "    return high\n",
        "    return math.ceil(mean)\n",
        ("mechanism/test_rounding.py",),
    ),
    Fault(
        "plan-on-records",
        "Records decide how gradients are computed.",
        "training/setup.py",
        "        made = artificial(records, _ARTIFICIAL, len(data.group_names))\n",
        "        made = records\n",
        ("attacks/test_plan_on_records.py",),
    ),
    Fault(
        "mixing-below-64",
        "Fewer than 64 samples pass together when their independence is tested.",
        "gradients/plan.py",
        "_COMPANY, _ALONE = 66, 3",
        "_COMPANY, _ALONE = 16, 3",
        ("attacks/test_mixing_samples.py::test_a_model_that_mixes_samples_is_refused",),
    ),
    Fault(
        "mixing-forward-only",
        "Derivatives are not compared between companies.",
        "gradients/mixing.py",
        "        for p, q, like in reversed(calls):\n",
        "        for p, q, like in []:\n",
        ("attacks/test_mixing_samples.py::test_a_model_that_mixes_samples_is_refused",),
    ),
    Fault(
        "mixing-losses-only",
        "Only losses are compared, so a head that starts at zero hides what mixes.",
        "gradients/mixing.py",
        "        calls = self._calls\n",
        "        calls: list[Any] = []\n",
        ("attacks/test_mixing_samples.py::test_a_model_that_mixes_samples_is_refused",),
    ),
    Fault(
        "mapped-with-batch-rules",
        "A function with its own mapping rule sees the whole batch of a mapped pass.",
        "gradients/foreign.py",
        "        if before(function):\n            raise",
        "        if before(function):\n            return True\n            raise",
        (
            "attacks/test_mixing_samples.py"
            "::test_a_function_with_its_own_mapping_rule_is_not_mapped",
        ),
    ),
    Fault(
        "known-layers-over-the-batch",
        "A LayerNorm over the batch counts as independent by its type.",
        "gradients/known_layers.py",
        " and len(layer.normalized_shape) < axes",
        "",
        ("gradients/test_known_layers.py::test_which_models_are_known",),
    ),
    Fault(
        "known-layers-by-base-class",
        "A hook does not matter for a layer that is known by its type.",
        "gradients/known_layers.py",
        "        or any(getattr(module, name) for name in _HOOKS)\n",
        "",
        ("gradients/test_known_layers.py::test_which_models_are_known",),
    ),
    Fault(
        "guard-without-state",
        "What a step leaves in the model is not compared.",
        "gradients/state.py",
        "        now, modules = dict(self._tensors()), self._modules\n",
        "        return\n        now, modules = dict(self._tensors()), self._modules\n",
        ("attacks/test_state_in_the_model.py",),
    ),
    Fault(
        "guard-of-attributes-only",
        "Variables that the code of a model reaches are not put back.",
        "gradients/places.py",
        "            self._walk(later, self.code)\n",
        "            del later\n",
        (PLACES,),
    ),
    Fault(
        "guard-by-torchs-count",
        "A tensor that is changed through `tensor.data` counts as unchanged.",
        "gradients/state.py",
        "self._compare(names, self._all_sums(), self._sums)",
        "del names",
        (PLACES,),
    ),
    Fault(
        "guard-once-a-step",
        "What a sample leaves in the model reaches the next sample of its batch.",
        "gradients/tape.py",
        "        function()\n",
        "        del function\n",
        (f"{PLACES}::test_a_sample_leaves_nothing_for_the_next_one_of_its_batch",),
    ),
    Fault(
        "masks-of-places",
        "A pass may set the seed of its random numbers, which then belong to places in a batch.",
        "gradients/plan.py",
        "    if drawn is not None:\n",
        "    if False:\n",
        (f"{MIXING}::test_random_numbers_that_are_not_fresh_are_refused",),
    ),
    Fault(
        "mapped-with-operators-in-derivatives",
        "An operator with a mapping rule that only a derivative calls sees the whole batch.",
        "gradients/plan.py",
        "    name = next(filter(None, names), None)\n",
        "    name = None\n",
        (f"{MIXING}::test_an_operator_with_a_mapping_rule_is_not_mapped_in_a_derivative_either",),
    ),
    Fault(
        "rule-without-guard",
        "What a rule keeps from call to call depends on the records, and so does its bound.",
        "mechanism/mechanism.py",
        '            object.__setattr__(self, "guard", RuleGuard(self.rule))\n',
        "            pass\n",
        ("attacks/test_state_in_the_rule.py",),
    ),
    Fault(
        "opacus-frozen-moves",
        "A parameter that is frozen before the step moves by its gradient without noise.",
        "opacus/optimizer.py",
        "            if id(p) not in released:\n",
        "            if not released:\n",
        (
            "opacus/test_leftovers.py::test_a_parameter_that_is_frozen_before_the_step_does_not_move",
        ),
    ),
    Fault(
        "opacus-other-parts",
        "A part of the module that is not trained keeps gradients of records.",
        "opacus/optimizer.py",
        "        everything = [*own, *self.neighbours]\n",
        "        everything = own\n",
        (
            "opacus/test_leftovers.py::test_a_part_that_the_optimizer_does_not_train_holds_nothing_either",
        ),
    ),
    Fault(
        "reason-from-records",
        "The privacy report quotes a message about a record.",
        "training/run.py",
        '"" if self.needs_records else tape.why_at_once',
        "tape.why_at_once",
        (f"{MIXING}::test_the_report_says_why_samples_pass_together",),
    ),
    Fault(
        "consistent-by-losses-alone",
        "A model whose backward pass mixes samples trains otherwise than its author meant.",
        "gradients/consistency.py",
        "    return right is not None and _same_losses",
        "    return _same_losses",
        (f"{MIXING}::test_a_model_that_mixes_samples_is_refused",),
    ),
    Fault(
        "consistent-as-given",
        "A model that mixes samples before a head of zeros trains otherwise than meant.",
        "gradients/consistency.py",
        "    change(tried)\n",
        "",
        (f"{MIXING}::test_a_model_that_mixes_samples_is_refused",),
    ),
    Fault(
        "mapped-with-operators",
        "An operator with a mapping rule is mapped if planning has not seen it.",
        "gradients/foreign.py",
        '            if name.partition("::")[0] not in _OWN:\n',
        "            if False:\n",
        (f"{MIXING}::test_an_operator_that_planning_has_not_seen_stops_a_mapped_pass",),
    ),
    Fault(
        "plan-margin-refuses",
        "A record whose gradient cancels is taken for a wrong formula, and stops the training.",
        "gradients/plan.py",
        "disagreement(tape, model, loss, x3, y3, longest=math.inf)",
        "disagreement(tape, model, loss, x3, y3)",
        ("attacks/test_plan_on_records.py",),
    ),
    Fault(
        "compiled-two-kinds-of-norm",
        "Batches that a graph does not take have slightly larger norms.",
        "training/company.py",
        "tape.may_be_quick = not compiled",
        "tape.may_be_quick = True",
        ("attacks/test_two_kinds_of_norm.py",),
    ),
    Fault(
        "dropout-from-a-seed",
        "The generator of dropout is filled with 32 bits of its key.",
        "mechanism/generators.py",
        "    torch.set_rng_state(_state(words[:-1]))\n",
        "    torch.default_generator.manual_seed(int(words[0]))\n",
        ("attacks/test_masks_from_a_seed.py",),
    ),
    Fault(
        "opacus-masks-from-a-seed",
        "Inside an Opacus loop, masks come from the seed that the user set.",
        "opacus/optimizer.py",
        "        fill_generators(os.urandom(KEY_BYTES), cuda=cuda)\n",
        "",
        ("opacus/test_opacus.py::test_a_seed_set_before_the_loop_does_not_make_masks_known",),
    ),
    Fault(
        "norm-underflows",
        "In float64, the length of a gradient underflows to 0.",
        "gradients/layers/layer.py",
        "computed.clamp(min=_SHORTEST)",
        "computed",
        ("gradients/test_rounding.py::test_a_norm_does_not_underflow_where_the_gradient_does_not",),
    ),
    Fault(
        "sensitivity-in-single-precision",
        "Weights are compared with S in the precision of a custom rule.",
        "mechanism/mechanism.py",
        "S.detach().reshape(()).to(torch.float64, copy=True)",
        "S.detach().reshape(()).clone()",
        ("rules/test_bounds.py",),
    ),
    Fault(
        "long-statistic",
        "The length of a long statistic is rounded down.",
        "mechanism/bounds.py",
        "up = 1 + max(each.shape[1] - 64, 0) * 2.0**-53",
        "up = 1 - 1e-10",
        ("rules/test_bounds.py",),
    ),
    Fault(
        "outputs-at-once",
        "A statistic of the output passes in a batch of any size.",
        "gradients/tape.py",
        "rows = self.rows if n and self.rows is not None and (self.pads or n > self.rows) else n",
        "rows = n",
        ("attacks/test_rows_in_company.py",),
    ),
    Fault(
        "bfloat16-optimiser",
        "A gradient is given to an optimiser in another dtype than its parameters.",
        "training/update.py",
        "gradient.to(self._joined.dtype)",
        "gradient",
        ("training/test_update.py",),
    ),
    Fault(
        "rounding-of-the-data",
        "The noise depends on the number of records.",
        "training/setup.py",
        "most_records(settings.q, covered)",
        "most_records(settings.q, settings.n)",
        ("attacks/test_number_of_records.py",),
    ),
    Fault(
        "rounding-of-any-data",
        "There may be more records than the bound on rounding is for.",
        "training/setup.py",
        "if n > most:",
        "if False:",
        ("attacks/test_number_of_records.py",),
    ),
    Fault(
        "split-of-all-rows",
        "Which part a record is in depends on the other records.",
        "data/sample.py",
        "uniform(self.words[:, _SPLIT])",
        "np.argsort(np.argsort(self.words[:, _SPLIT])) / len(self)",
        ("attacks/test_neighbouring_splits.py",),
    ),
    Fault(
        "split-by-dtype",
        "What a record holds is read off the type of the column, which other records change.",
        "data/content.py",
        "        return _number(number)\n    if _DATE",
        "        return _text(stripped.encode())\n    if _DATE",
        ("attacks/test_neighbouring_splits.py",),
    ),
    Fault(
        "split-of-dates",
        "A date is another value in a column that one record turns into text.",
        "data/content.py",
        "    if _DATE.fullmatch(stripped):\n",
        "    if False:\n",
        ("attacks/test_neighbouring_splits.py",),
    ),
    Fault(
        "split-of-copies",
        "Equal records all have the coins of one.",
        "data/sample.py",
        "        if number:\n",
        "        if False:\n",
        ("attacks/test_neighbouring_splits.py",),
    ),
    Fault(
        "records-of-the-data",
        "q and T come from the number of records, although another one was declared.",
        "training/config.py",
        "n = int(self.records) if declared else n",
        "n = n",
        ("attacks/test_number_of_records.py",),
    ),
    Fault(
        "rounding-rate-as-given",
        "N is computed for the rate that was asked for, which may be below the drawn one.",
        "mechanism/rounding.py",
        "mean = drawn_rate(q) * (n + 1)",
        "mean = q * (n + 1)",
        ("mechanism/test_rounding.py",),
    ),
    Fault(
        "sums-in-single-precision",
        "The weighted sum is computed in the model's precision.",
        "training/step.py",
        'dtype = torch.float64 if mechanism.noise["gradient"] else passes.tape.layout.dtype',
        "dtype = passes.tape.layout.dtype",
        ("attacks/test_sums_in_company.py",),
    ),
    Fault(
        "blocks-of-any-size",
        "The last block of a batch is not padded.",
        "gradients/tape.py",
        "missing = self.rows - n if self.pads else 0",
        "missing = 0",
        ("attacks/test_rows_in_company.py",),
    ),
    Fault(
        "union-counts-twice",
        "Steps that two ledgers share count twice.",
        "mechanism/ledger.py",
        "            joined += _joined(by_run[run])\n",
        "            joined += by_run[run]\n",
        (f"{LEDGERS}::test_a_union_is_the_set_of_all_steps",),
    ),
    Fault(
        "union-forgets-reserved",
        "Steps that were reserved and perhaps not taken are left out of a union.",
        "mechanism/ledger.py",
        "for e in entries if e.steps)",
        "for e in entries if e.steps and not e.reserved)",
        (f"{LEDGERS}::test_branches_of_one_checkpoint",),
    ),
    Fault(
        "union-believes-contradictions",
        "Of two different steps in one place, the first is kept.",
        "mechanism/ledger.py",
        "if not one.is_same_release(other):",
        "if False:",
        (f"{LEDGERS}::test_two_different_steps_in_one_place_are_refused",),
    ),
    Fault(
        "union-without-the-beginning",
        "A branch is joined without the steps that it started from.",
        "mechanism/ledger.py",
        "        _check_parents(union.entries)\n",
        "",
        (f"{LEDGERS}::test_a_branch_without_its_beginning_is_refused",),
    ),
    Fault(
        "ledger-believes-negative-steps",
        "A ledger of −5 steps is accepted.",
        "mechanism/entry.py",
        "if not _is_whole(size) or size < 0:",
        "if not _is_whole(size):",
        (f"{LEDGERS}::test_a_damaged_entry_is_named",),
    ),
    Fault(
        "correction-pairs",
        "A release of one number is drawn without a pair.",
        "mechanism/entry.py",
        "sum((size + 1) // 2 for _, size in self.sizes)",
        "sum(size // 2 for _, size in self.sizes)",
        (f"{CORRECTION}::test_the_errors_of_several_samplers_add_up",),
    ),
    Fault(
        "correction-one-way",
        "The sampler's error is added on one of the two datasets only.",
        "mechanism/correction.py",
        "return Real(epsilon + 2 * terms.epsilon_s, epsilon, terms)",
        "return Real(epsilon + terms.epsilon_s, epsilon, terms)",
        (f"{CORRECTION}::test_what_is_returned_can_be_checked_by_hand",),
    ),
    Fault(
        "correction-factor",
        "What the sampler takes from δ is not multiplied by 1 + e^ε.",
        "mechanism/correction.py",
        "lost = _softplus(bound + 2 * epsilon_s) + mass",
        "lost = mass",
        (f"{CORRECTION}::test_the_terms_keep_delta_in_sixty_digits",),
    ),
    Fault(
        "correction-unchecked-bound",
        "ε may be larger than the E for which δ′ was computed.",
        "mechanism/correction.py",
        "        if start <= bound:\n",
        "        if True:\n",
        (f"{CORRECTION}::test_the_search_finds_a_bound_that_holds",),
    ),
    Fault(
        "calibration-of-ideal-noise",
        "Noise is calibrated as if it were ideal.",
        "mechanism/calibration.py",
        "[terms.delta], tolerance, [delta])[0] + 2 * terms.epsilon_s",
        "[delta], tolerance, [delta])[0]",
        (f"{CALIBRATION}::test_calibration_of_drawn_noise_never_exceeds_the_target_and_hits_it",),
    ),
    Fault(
        "accounting-rate",
        "The cost of a step is computed for half of its sampling rate.",
        "mechanism/accountants.py",
        "library.PoissonSampledDpEvent(kind.q, gaussian)",
        "library.PoissonSampledDpEvent(kind.q / 2, gaussian)",
        (f"{ACCOUNTING}::test_the_published_epsilons_come_out",),
    ),
    Fault(
        "accounting-multiplier",
        "The cost of a step is computed for a multiplier that is a hundredth larger.",
        "mechanism/accountants.py",
        "gaussian = library.GaussianDpEvent(kind.multiplier)",
        "gaussian = library.GaussianDpEvent(1.01 * kind.multiplier)",
        (
            f"{ACCOUNTING}::test_the_published_epsilons_come_out",
            f"{ACCOUNTING}::test_opacus_agrees",
        ),
    ),
    Fault(
        "accounting-one-step",
        "Steps that are alike are counted once.",
        "mechanism/accountants.py",
        "return library.SelfComposedDpEvent(step, kind.steps)",
        "return library.SelfComposedDpEvent(step, 1)",
        (f"{ACCOUNTING}::test_the_published_epsilons_come_out",),
    ),
    Fault(
        "accounting-lost-delta",
        "What double precision loses of δ is not taken off.",
        "mechanism/accountants.py",
        "accountant.get_epsilon(delta - lost)",
        "accountant.get_epsilon(delta)",
        (f"{ACCOUNTING}::test_pld_stays_above_the_exact_value_at_a_tiny_delta",),
    ),
    Fault(
        "accounting-whole-orders",
        "RDP tries whole orders only, so its ε is larger than with all of them.",
        "mechanism/accountants.py",
        "if abs(order - best) < 1)",
        "if order == best)",
        (f"{ACCOUNTING}::test_rdp_takes_the_best_of_all_orders",),
    ),
    Fault(
        "accounting-coarse-grid",
        "The grid of losses is ten times too coarse.",
        "mechanism/accountants.py",
        "    return max(min([by_variance, *by_order]), ",
        "    return max(10 * min([by_variance, *by_order]), ",
        (
            f"{ACCOUNTING}::test_pld_of_one_step_is_the_hockey_stick_divergence",
            f"{ACCOUNTING}::test_without_sampling_it_is_the_gaussian_mechanism",
        ),
    ),
    Fault(
        "accounting-rounds-up",
        "Nearly equal multipliers are rounded up to the largest of them.",
        "mechanism/accountants.py",
        "StepKind(some[0].q, some[0].multiplier, ",
        "StepKind(some[0].q, some[-1].multiplier, ",
        (f"{ACCOUNTING}::test_a_ledger_of_many_multipliers_is_bounded_quickly_and_closely",),
    ),
    Fault(
        "accounting-without-amplification",
        "Without amplification the steps' precisions are not added up.",
        "mechanism/accounting.py",
        "math.sqrt(sum(kind.steps * kind.multiplier**-2 for kind in kinds))",
        "math.sqrt(sum(kind.multiplier**-2 for kind in kinds))",
        (f"{ACCOUNTING}::test_without_sampling_it_is_the_gaussian_mechanism",),
    ),
    Fault(
        "accounting-not-private",
        "A ledger without an ε gets one.",
        "mechanism/accounting.py",
        "_real(ledger, delta, accountant, [delta]) if ledger.is_private else None",
        "_real(ledger, delta, accountant, [delta])",
        (f"{ACCOUNTING}::test_a_ledger_that_is_not_private_has_no_epsilon",),
    ),
    Fault(
        "calibration-above",
        "Calibration may end with an ε above the target.",
        "mechanism/calibration.py",
        "if target * (1 - _WINDOW) <= price <= target * (1 - _MARGIN):",
        "if target * (1 - _WINDOW) <= price <= target * (1 + 20 * _WINDOW):",
        (
            f"{CALIBRATION}::test_calibration_never_exceeds_the_target_and_hits_it",
            f"{CALIBRATION}::test_calibration_hits_any_target",
        ),
    ),
    Fault(
        "gradient-multiplier",
        "The noise of a gradient beside a count is that of the gradient alone.",
        "mechanism/calibration.py",
        "return float((joint**-2 - (s / count) ** 2) ** -0.5)",
        "return float(joint)",
        (f"{CALIBRATION}::test_gradient_and_count_cost_what_the_joint_costs",),
    ),
    Fault(
        "rounded-down",
        "A printed ε is rounded to the nearest number, which may be below it.",
        "mechanism/accounting.py",
        "rounding=ROUND_CEILING)",
        'rounding="ROUND_HALF_EVEN")',
        (f"{ACCOUNTING}::test_a_printed_number_is_never_below_its_value",),
    ),
)

SAMPLES = (
    Fault(
        "sampling-rate",
        "A coin is heads up to its threshold and not below it.",
        "mechanism/sampling.py",
        ">> np.uint64(_COIN) < np.uint64(low)",
        ">> np.uint64(_COIN) <= np.uint64(low)",
        (
            f"{SAMPLING}::test_8_bits_and_56_decide_as_one_word_of_64_does",
            f"{SAMPLING}::test_every_word_of_a_smaller_coin_gives_exactly_the_rate",
        ),
    ),
    Fault(
        "sampling-8-bits",
        "The further bits of a coin are left out, so that a rate has 8 bits.",
        "mechanism/sampling.py",
        "        keep[undecided] = self._below(draw[undecided] + first, record[undecided], low)\n",
        "",
        (f"{SAMPLING}::test_8_bits_and_56_decide_as_one_word_of_64_does",),
    ),
    Fault(
        "sampling-repeats",
        "Every batch is drawn twice.",
        "mechanism/sampling.py",
        "        return self._drawn[index - first]\n",
        "        return self._drawn[(index - first) // 2 * 2]\n",
        (f"{SAMPLING}::test_batches_are_independent_of_each_other",),
    ),
    Fault(
        "sampling-last-record",
        "The last record of the data is never drawn.",
        "mechanism/sampling.py",
        "keep = record < self._n  #",
        "keep = record < self._n - 1  #",
        (f"{SAMPLING}::test_a_record_is_in_a_batch_by_its_own_coin",),
    ),
    Fault(
        "divides-by-batch",
        "Sums are divided by the size of the batch, which reveals it.",
        "mechanism/sampling.py",
        "        del batch\n        return self._B\n",
        "        return float(len(batch))\n",
        (f"{SAMPLING}::test_what_is_divided_by_does_not_tell_neighbouring_datasets_apart",),
    ),
    Fault(
        "sampling-keeps-its-block",
        "After the first draws, their batches are drawn again.",
        "mechanism/sampling.py",
        "        if first != self._first:\n",
        "        if not self._drawn:\n",
        (f"{SAMPLING}::test_a_batch_does_not_depend_on_what_was_drawn_before",),
    ),
    Fault(
        "sampling-one-counter",
        "Undecided coins of one record are the same in every draw.",
        "mechanism/sampling.py",
        "self._below(draw[undecided] + first, ",
        "self._below(0 * draw[undecided], ",
        (f"{SAMPLING}::test_no_coin_is_used_twice",),
    ),
    Fault(
        "sampling-rate-in-the-ledger",
        "The ledger has the rate that was asked for, which is below the drawn one.",
        "mechanism/sampling.py",
        "        self.q: float | None = drawn_rate(q)\n",
        "        self.q: float | None = q\n",
        (f"{SAMPLING}::test_the_rate_that_is_drawn_is_never_above_the_one_in_the_ledger",),
    ),
    Fault(
        "sampling-rounds-down",
        "Q is rounded down.",
        "mechanism/sampling.py",
        "return -((-mantissa << (_COIN + _FURTHER)) // exponent)",
        "return (mantissa << (_COIN + _FURTHER)) // exponent",
        (f"{SAMPLING}::test_the_rate_that_is_drawn_is_never_above_the_one_in_the_ledger",),
    ),
    Fault(
        "words-counter",
        "The counter of AES skips blocks.",
        "mechanism/words.py",
        'counter = (block % _COUNTERS).to_bytes(16, "big")',
        'counter = (2 * block % _COUNTERS).to_bytes(16, "big")',
        (f"{WORDS}::test_a_span_is_the_plain_counter_mode",),
    ),
    Fault(
        "words-odd-first",
        "A span that begins within a block begins one word too early.",
        "mechanism/words.py",
        "return out[skipped : skipped + count]",
        "return out[:count]",
        (f"{WORDS}::test_a_span_is_the_plain_counter_mode",),
    ),
    Fault(
        "words-one-key",
        "All purposes have one key.",
        "mechanism/words.py",
        "        purpose.encode(), key=key",
        '        b"", key=key',
        (f"{WORDS}::test_other_keys_and_other_purposes_have_other_keys",),
    ),
)

NOISE = (
    Fault(
        "noise-tail-cut",
        "Short words have no further bits: nothing lies beyond 9.3 standard deviations.",
        "mechanism/noise.py",
        "        if len(draw):\n",
        "        if False:\n",
        (f"{NOISES}::test_a_pair_is_within_c_of_the_real_one_at_the_edges",),
    ),
    Fault(
        "noise-draws-share",
        "Two draws share their words.",
        "mechanism/noise.py",
        "self._words.span(2 * (self._pairs * index + start), 2 * pairs)",
        "self._words.span(2 * (self._pairs * (index // 2) + start), 2 * pairs)",
        (
            f"{NOISES}::test_a_value_is_a_function_of_its_key_draw_and_place",
            f"{NOISES}::test_no_word_is_used_twice",
        ),
    ),
    Fault(
        "noise-sizes-share",
        "Releases of two sizes share their noise.",
        "mechanism/noise.py",
        'derive(key, f"{name} of {size}")',
        "derive(key, name)",
        (f"{NOISES}::test_releases_of_other_names_keys_and_sizes_have_other_noise",),
    ),
    Fault(
        "noise-narrow",
        "The noise has nine tenths of its standard deviation.",
        "mechanism/noise.py",
        "u.log_().mul_(-2.0).sqrt_()",
        "u.log_().mul_(-1.62).sqrt_()",
        (
            f"{NOISES}::test_moments",
            f"{RELEASE}::test_released_values_have_the_spread_that_the_ledger_claims",
        ),
    ),
    Fault(
        "noise-blocks-overlap",
        "Blocks of a large release share their words.",
        "mechanism/noise.py",
        "start, size = b * BLOCK // 2, min(",
        "start, size = b * BLOCK // 4, min(",
        (f"{NOISES}::test_no_word_is_used_twice",),
    ),
    Fault(
        "noise-further-of-the-block",
        "Short words of several blocks are extended by the same words.",
        "mechanism/noise.py",
        "[draw + index, pair + start]",
        "[draw + index, pair]",
        (f"{NOISES}::test_every_short_word_of_a_draw_has_its_own_further_word",),
    ),
    Fault(
        "noise-keeps-its-block",
        "After the first draws, their noise is used again.",
        "mechanism/noise.py",
        "if self._rows is None or self._rows[0] != first:",
        "if self._rows is None:",
        (f"{NOISES}::test_a_draw_has_its_values_in_any_order_of_draws",),
    ),
    Fault(
        "noise-half-circle",
        "Angles lie in half a circle.",
        "mechanism/noise.py",
        "    angle.mul_(math.pi * 2.0**-63)\n",
        "    angle.mul_(math.pi * 2.0**-64)\n",
        (f"{NOISES}::test_every_cell_of_a_small_sampler_is_within_its_lambda",),
    ),
    Fault(
        "noise-in-single-precision",
        "The radius is rounded to float32.",
        "mechanism/noise.py",
        "    radius = u.log_().mul_(-2.0).sqrt_()\n",
        "    radius = u.log_().mul_(-2.0).sqrt_().float().double()\n",
        (
            f"{NOISES}::test_a_pair_is_within_c_of_the_real_one_for_random_words",
            f"{NOISES}::test_the_probability_of_a_cell_is_within_lambda_of_the_real_one",
        ),
    ),
    Fault(
        "noise-optimistic-bound",
        "λ is a thousandth of what it should be.",
        "mechanism/noise.py",
        "LAMBDA = 8 * RATIO**2 * C\n",
        "LAMBDA = 8 * RATIO**2 * C / 1000\n",
        (f"{NOISES}::test_the_constants_of_the_bound",),
    ),
)

# The file that holds what a rule returns to its bounds, and the one that calls the rule.
HELD, MECHANISM = "mechanism/bounds.py", "mechanism/mechanism.py"

BOUNDS = (
    Fault(
        "bounds-no-clamp",
        "A weight above the bound is not clamped.",
        HELD,
        "torch.where(longer, raw.sign() * (S / lengths), raw), longer",
        "raw, longer",
        (f"{EVERY_RULE}::test_leaving_one_sample_out_moves_the_sum_by_at_most_S",),
    ),
    Fault(
        "bounds-keeps-nan",
        "A weight that is not a number is kept.",
        HELD,
        "    raw = torch.where(finite, raw, 0.0)\n",
        "",
        (
            "rules/test_bounds.py",
            f"{EVERY_RULE}::test_leaving_one_sample_out_moves_the_sum_by_at_most_S",
        ),
    ),
    Fault(
        "bounds-long-statistic",
        "A statistic longer than 1 is not shortened.",
        HELD,
        "        each = each / (lengths * up).clamp(min=1.0)\n",
        "",
        (f"{EVERY_RULE}::test_leaving_one_sample_out_moves_the_statistics_by_at_most_1",),
    ),
    Fault(
        "bounds-counts-left-out",
        "Samples that are left out are counted all the same.",
        HELD,
        "        each = torch.where(keep.unsqueeze(1), each, 0.0)\n",
        "        pass\n",
        (f"{EVERY_RULE}::test_what_is_not_kept_contributes_exactly_nothing",),
    ),
    Fault(
        "bounds-batch-to-custom-rules",
        "Custom rules receive the whole batch.",
        MECHANISM,
        "        if self._at_once:\n",
        "        if True:\n",
        (f"{EVERY_RULE}::test_a_mapped_rule_is_shown_one_sample",),
    ),
)

STATEMENT = (
    Fault(
        "report-last-multipliers",
        "The report states the multipliers of the last kind of step only.",
        "mechanism/statement.py",
        "**_multipliers(Ledger.joined(ledger, left)),",
        "**_multipliers(Ledger(ledger.entries[-1:])),",
        ("mechanism/test_statement.py::test_multipliers_that_depend_on_the_step_are_a_range",),
    ),
    Fault(
        "json-sound-custom-rule",
        "A bound that is enforced and not proved is called sound in JSON.",
        "comparison/result.py",
        "outcome.soundness in PROVED",
        'outcome.soundness != "no valid ε"',
        ("comparison/test_compare.py::test_only_a_proved_bound_is_sound_in_json",),
    ),
    Fault(
        "statement-counts-events",
        "The privacy report has exact counts of what happened in training.",
        "training/result.py",
        "return statement.report(self.settings, self.ledger, self.facts)",
        "return statement.report(self.settings, self.ledger, self.facts) | events(self.trace)",
        ("attacks/test_published_counts.py",),
    ),
    Fault(
        "schema-believed",
        "A schema that was read from the data counts as public while its warning is there.",
        "data/schema.py",
        'return [READ] if schema is not None and "warning" in schema else []',
        "return []",
        ("attacks/test_schema_from_the_data.py", "data/test_schema.py"),
    ),
    Fault(
        "skeleton-reads-types",
        "The names of columns come from reading the table.",
        "data/formats.py",
        "return _header(file) if suffix in TEXTS else stored_names(file, suffix)",
        "return tuple(read(path).columns)",
        ("data/test_skeleton.py",),
    ),
    Fault(
        "skeleton-unfilled",
        "A column of a skeleton that is not filled in is not named.",
        "data/schema.py",
        "    check_filled(schema, name)\n",
        "",
        ("data/test_skeleton.py",),
    ),
    Fault(
        "card-figures",
        "The card has exact test figures of the groups without being asked.",
        "export/card.py",
        "_accuracy(trained) if with_group_figures else WITHOUT_FIGURES",
        "_accuracy(trained)",
        ("export/test_export.py::test_the_folder_has_no_figures_of_the_groups",),
    ),
    Fault(
        "card-names-are-markup",
        "A bar in the name of a group ends the cell of a table.",
        "export/markdown.py",
        "{}\\[\\]<>|&~",
        "{}\\[\\]<>&~",
        ("export/test_markdown.py",),
    ),
    Fault(
        "opacus-leftovers",
        "After an Opacus step that was not a release, gradients without noise stay in the module.",
        "opacus/optimizer.py",
        "            self._clear(released)\n",
        "            pass\n",
        ("opacus/test_leftovers.py",),
    ),
    Fault(
        "groups-not-declared",
        "Groups are exchanged only at equal thresholds.",
        "mechanism/trial.py",
        "_exchange_groups(mechanism, _spread(state), _spread(now), records)",
        "_exchange_groups(mechanism, state, now, records)",
        ("mechanism/test_trial.py::test_a_rule_that_reads_the_group_must_declare_it",),
    ),
    Fault(
        "report-invalid-epsilon",
        "A rule without a valid ε gets one in the report.",
        "mechanism/statement.py",
        "    if settings.rule.soundness == NO_EPSILON:\n",
        "    if False:\n",
        (f"{RESULT}::test_a_rule_that_claims_no_epsilon_gets_none_though_its_ledger_has_one",),
    ),
    Fault(
        "report-swaps-accountants",
        "The report states RDP's ε where it says PLD.",
        "mechanism/statement.py",
        '"epsilon": None if real is None else real.epsilon,',
        '"epsilon": epsilon(settings, ledger, "rdp"),',
        (f"{RESULT}::test_epsilon_is_that_of_the_ledger",),
    ),
    Fault(
        "report-tells-the-seed",
        "The report holds the seed.",
        "mechanism/statement.py",
        'else "given and not stated here: reproducible, so not private against anyone who "\n',
        'else f"given, {settings.seed}, "\n',
        (
            f"{RESULT}::test_the_paragraph_reads_at_79_columns_and_has_the_numbers",
            f"{RESULT}::test_the_report_states_everything",
        ),
    ),
    Fault(
        "report-forgets-uncovered",
        "What ε does not cover of the data's preparation is not in the report.",
        "mechanism/statement.py",
        '"not_covered": [*counted, *NOT_COVERED, *uncovered],',
        '"not_covered": [*counted, *NOT_COVERED],',
        ("data/test_parquet.py::test_what_epsilon_does_not_cover_is_in_the_privacy_report",),
    ),
    Fault(
        "checkpoint-publishes-secrets",
        "Random generators go into the file that may be published.",
        "checkpoint.py",
        '"model.pt": _tensors(checkpoint.model),',
        '"model.pt": _tensors({**checkpoint.model, **checkpoint.secret}),',
        (f"{RESUME}::test_what_may_be_published_holds_no_key",),
    ),
    Fault(
        "checkpoint-unpickles",
        "A checkpoint may run code when it is loaded.",
        "checkpoint.py",
        "contents[name]), weights_only=True)",
        "contents[name]), weights_only=False)",
        (f"{RESUME}::test_code_in_a_checkpoint_is_not_run",),
    ),
)

TABLES = (
    Fault(
        "encoder-unbounded",
        "A number outside its range is not clipped.",
        "data/columns.py",
        "np.clip(scaled, -bound, bound)",
        "np.clip(scaled, -1000 * bound, 1000 * bound)",
        (f"{TABLE}::test_infinite_numbers_are_missing_and_stray_ones_are_held",),
    ),
    Fault(
        "encoder-sees-test-rows",
        "Means and deviations are taken over all rows and not over the training rows.",
        "data/encoder.py",
        "        series = _taken(frame, name, rows)\n        reason",
        "        series = frame[name]\n        reason",
        (f"{TABLE}::test_only_training_rows_shape_the_encoder",),
    ),
    Fault(
        "encoder-rare-categories",
        "A category of a single person has its own indicator.",
        "data/encoder.py",
        "least = max(RARE_ROWS, math.ceil(RARE_SHARE * len(series)))",
        "least = 1",
        (f"{TABLE}::test_categories_are_indicators_and_rare_ones_share_one",),
    ),
    Fault(
        "encoder-group-order",
        "Several protected columns are combined in the wrong order.",
        "data/encoder.py",
        "codes = codes * len(labels.names) + part",
        "codes = part * max(1, len(names) // len(labels.names)) + codes",
        (f"{TABLE}::test_several_groups_intersect",),
    ),
    Fault(
        "encoder-missing-indicator",
        "Missing numbers have no indicator.",
        "data/columns.py",
        "    out[:, 1:] = gaps[:, None]\n    return np.abs",
        "    out[:, 1:] = 0.0\n    return np.abs",
        (
            f"{TABLE}::test_infinite_numbers_are_missing_and_stray_ones_are_held",
            f"{TABLE}::test_new_rows_may_hold_anything",
        ),
    ),
    Fault(
        "table-hides-the-encoder",
        "The encoder fitted on training rows is not listed among what ε does not cover.",
        "data/table.py",
        '            "the encoder (columns used, categories, means and deviations), '
        'fitted on the "\n'
        '            "training rows"\n',
        "",
        (f"{TABLE}::test_what_epsilon_does_not_cover_is_listed",),
    ),
    Fault(
        "dataset-prints-data",
        "A dataset prints the records it holds.",
        "data/dataset.py",
        "    x: Inputs = field(repr=False)\n",
        "    x: Inputs = field()\n",
        ("data/test_dataset.py::test_the_data_are_not_printed",),
    ),
    Fault(
        "fingerprint-shape-only",
        "Two datasets of as many records have one fingerprint, and so their runs share batches "
        "and noise.",
        "data/streamed.py",
        'return f"{name} {dtype} {list(shape)} {bits.digest}"',
        'return f"{name} {dtype} {list(shape)}"',
        (f"{RESUME}::test_a_checkpoint_of_as_many_other_records_is_refused",),
    ),
)

AUDIT = (
    Fault(
        "terms-noise-first-order",
        "The term of the noise has no factor ½.",
        "audit/decomposition.py",
        "scale = self._lr**2 / 2 * variance",
        "scale = self._lr**2 * variance",
        (f"{TERMS}::test_the_noise_term_is_what_noise_does_to_the_loss",),
    ),
    Fault(
        "terms-direction",
        "The term of the direction leaves the length ratio out of its second order.",
        "audit/decomposition.py",
        '"dir": lr * (rho * slopes - clipped_slopes) + half * (clipped_forms - rho**2 * forms),',
        '"dir": lr * (rho * slopes - clipped_slopes) + half * (clipped_forms - rho * forms),',
        (f"{TERMS}::test_magnitude_and_direction_make_up_clipping",),
    ),
    Fault(
        "terms-ratio-of-nothing",
        "The length ratio of two gradients of which one is 0 is not 1.",
        "audit/decomposition.py",
        "known = (long > 0) & (short > 0)",
        "known = long > 0",
        (f"{TERMS}::test_no_gradient_has_length_ratio_one",),
    ),
    Fault(
        "terms-sample-error",
        "The error of a sample of a group leaves out that it is a sample.",
        "audit/decomposition.py",
        "        square += float(each.var(ddof=1) / len(each)) * (1 - sizes.sum() / of)\n",
        "        square += 0.0 * float(each.var(ddof=1))\n",
        (f"{TERMS}::test_a_sample_of_a_group_is_right_within_its_error",),
    ),
    Fault(
        "curvature-trace",
        "The trace is divided by the number of parts.",
        "audit/curvature.py",
        "        mean = self.sizes @ forms / self.n\n",
        "        mean = self.sizes @ forms / (self.n + 1)\n",
        (
            "audit/test_curvature.py::test_signs_are_exact_where_the_hessian_is_diagonal",
            "audit/test_curvature.py::test_trace_by_signs_is_right_within_its_error",
        ),
    ),
    Fault(
        "bound-without-square",
        "Proposition 3's bound has the norm of the clipped gradient without its square.",
        "audit/bounds.py",
        "return float(lr * np.mean(_turned(a, rho) - _turned(b, rho) - clipped_norms**2))",
        "return float(lr * np.mean(_turned(a, rho) - _turned(b, rho) - clipped_norms))",
        (
            "audit/test_bounds.py::test_proposition_3_is_never_violated",
            "audit/test_bounds.py::test_proposition_3_is_reached",
        ),
    ),
    Fault(
        "bound-of-clipping",
        "The bound of clipping leaves the shares' difference out.",
        "audit/bounds.py",
        "first = share_a * norm_a**2 - share_b * norm_b**2 - abs(share_a - share_b) * norm_a * "
        "norm_b",
        "first = share_a * norm_a**2 - share_b * norm_b**2",
        (
            "audit/test_bounds.py::test_the_bound_of_clipping_is_never_violated_in_expectation",
            "audit/test_bounds.py::test_the_bound_of_clipping_can_be_come_near",
        ),
    ),
    Fault(
        "metrics-broken-scores",
        "A sample whose scores are not finite is left out of its group's loss.",
        "audit/metrics.py",
        'reduction="none").masked_fill(broken, math.inf)',
        'reduction="none").masked_fill(broken, 0.0)',
        (f"{METRICS}::test_a_score_that_is_not_finite_is_wrong_in_every_column",),
    ),
    Fault(
        "metrics-ties",
        "Equal margins do not share their ranks in the AUC.",
        "audit/metrics.py",
        "ranks = (np.cumsum(count) - (count - 1) / 2)[level]",
        "ranks = np.cumsum(count)[level].astype(float)",
        (f"{METRICS}::test_auc_is_the_share_of_pairs_in_order",),
    ),
    Fault(
        "metrics-rate",
        "The true positive rate is computed over all samples.",
        "audit/metrics.py",
        '"tpr": _percent(selected[some.y == 1]),',
        '"tpr": _percent(selected & (some.y == 1)),',
        (f"{METRICS}::test_scikit_learn_agrees_on_two_classes",),
    ),
    Fault(
        "metrics-evaluation",
        "Scores are taken with dropout.",
        "audit/metrics.py",
        "    model.eval()\n",
        "    pass\n",
        (f"{METRICS}::test_scores_are_the_outputs_of_the_model_in_evaluation",),
    ),
    Fault(
        "cost-gap",
        "The gap is that of the first two groups.",
        "audit/cost.py",
        "highest = np.where(undefined, -np.inf, table).max(axis=1, initial=-np.inf)",
        "highest = np.where(undefined, -np.inf, table)[:, :2].max(axis=1, initial=-np.inf)",
        ("audit/test_cost.py::test_the_gap_is_the_largest_of_all_pairs",),
    ),
    Fault(
        "statistics-error",
        "The standard error divides by n where it should by n − 1.",
        "audit/statistics.py",
        "float(defined.std(ddof=1) / math.sqrt(len(defined)))",
        "float(defined.std() / math.sqrt(len(defined)))",
        (f"{STATISTICS}::test_scipy_agrees_on_means_errors_and_t_intervals",),
    ),
    Fault(
        "statistics-bootstrap-narrow",
        "The bootstrap takes plain percentiles, which are too narrow.",
        "audit/statistics.py",
        "tail = float(ndtr(-math.sqrt(n / (n - 1)) * student(n - 1, level)))",
        "tail = (1 - level) / 2 + 0.0 * float(ndtr(0.0))",
        (
            f"{STATISTICS}::test_the_bootstrap_is_that_of_all_samples",
            f"{STATISTICS}::test_the_bootstrap_covers_what_the_module_says",
        ),
    ),
    Fault(
        "statistics-wilcoxon-strict",
        "The p of the signed-rank test leaves the observed value out.",
        "audit/statistics.py",
        "float(chance[: w + 1].sum())",
        "float(chance[:w].sum())",
        (f"{STATISTICS}::test_wilcoxon_is_the_enumeration_of_all_signs",),
    ),
    Fault(
        "statistics-holm",
        "Holm's correction multiplies every p by the number of questions left after it.",
        "audit/statistics.py",
        "(len(p_values) - i) * p_values[name]",
        "(len(p_values) - i - 1) * p_values[name]",
        (f"{STATISTICS}::test_holm_by_hand",),
    ),
)

ONCE = "distributed/test_ranks.py::test_every_number_gets_its_noise_once"
OWNER = "distributed/test_sharded.py::test_every_number_gets_its_noise_from_its_owner"
SAME_MODEL = "distributed/test_ranks.py::test_two_ranks_train_the_model_that_one_process_trains"

RANKS = (
    Fault(
        "ranks-noise-of-the-first",
        "Every rank takes the noise of the first one's slice.",
        "distributed/ranks.py",
        "self.ranges = [(first, min(first + self._each, size))]",
        "self.ranges = [(0, min(self._each, size))]",
        (ONCE,),
    ),
    Fault(
        "ranks-without-a-sum",
        "The gradients of the other ranks are left out.",
        "distributed/ranks.py",
        'shares["gradient"] = update if isinstance(update, Sharded) else spread',
        'del shares["gradient"], spread',
        (
            ONCE,
            SAME_MODEL,
        ),
    ),
    Fault(
        "ranks-counts-apart",
        "Every rank releases its own count.",
        "distributed/ranks.py",
        "        return self._ranks.sum(value)\n",
        "        return value\n",
        (SAME_MODEL,),
    ),
    Fault(
        "ranks-whole-batch",
        "Every rank takes the whole batch, so each record counts several times.",
        "distributed/ranks.py",
        "return torch.tensor_split(batch, self.world)[self.rank]",
        "return batch",
        ("distributed/test_ranks.py::test_every_rank_computes_a_part_of_the_batch", SAME_MODEL),
    ),
    Fault(
        "ranks-same-records",
        "Ranks with different records may have the same ones.",
        "distributed/ranks.py",
        '        if twice is not None:\n            raise ValueError(\n                f"Ranks ',
        '        if False:\n            raise ValueError(\n                f"Ranks ',
        ("distributed/test_ranks.py::test_equal_local_records_are_refused",),
    ),
    Fault(
        "pieces-noise-of-the-first",
        "Every piece gets the noise of the first one.",
        "distributed/sharded.py",
        "self.ranges = self.pieces.ranges(ranks.rank)",
        "self.ranges = self.pieces.ranges(0)",
        (OWNER,),
    ),
    Fault(
        "pieces-noise-of-others",
        "A piece gets the noise of other numbers.",
        "mechanism/release.py",
        "for first, end in share.ranges])",
        "for first, end in share.ranges]).flip(0)",
        (OWNER,),
    ),
)

STEP, GRAPH, NEIGHBOURS = (
    "training/test_step.py",
    "training/test_graph.py",
    "training/test_neighbours.py",
)
ALGORITHM_2 = f"{STEP}::test_a_step_is_algorithm_2"
MANY_STEPS = f"{STEP}::test_fit_is_algorithm_2_over_many_steps"
NOT_FINITE, STREAMS, OPACUS = (
    "training/test_non_finite.py",
    "training/test_noise_streams.py",
    "opacus/test_opacus.py",
)

CORE = (
    Fault(
        "step-only-the-last-chunk",
        "Of a batch in several chunks only the last is summed.",
        "training/step.py",
        "total = part.total if total is None else total.add_(part.total)",
        "total = part.total",
        (ALGORITHM_2,),
    ),
    Fault(
        "step-counts-one-chunk",
        "Of a batch in several chunks only one is counted.",
        "training/step.py",
        "return Part(total, torch.stack(counts).sum(dim=0), _join(seen))",
        "return Part(total, counts[0], _join(seen))",
        (ALGORITHM_2,),
    ),
    Fault(
        "step-clips-before-it-counts",
        "A rule whose bounds follow from the count is clipped with those of the last step.",
        "training/step.py",
        "    part, S = _clip(mechanism, passes, state, now)\n    if not",
        "    part, S = _clip(mechanism, passes, state, state)\n    if not",
        (ALGORITHM_2,),
    ),
    Fault(
        "step-with-undeclared-counts-first",
        "A rule that clips with its count without declaring it is not refused.",
        MECHANISM,
        "if self.rule.counts_first or now is state:",
        "if True:",
        (f"{STEP}::test_a_rule_that_clips_with_its_count_and_does_not_declare_it_is_refused",),
    ),
    Fault(
        "step-counts-filling",
        "Padding rows are counted and summed.",
        "training/passes.py",
        "return self.chunk.real if self.finite is None else self.finite",
        "return self.finite",
        (ALGORITHM_2,),
    ),
    Fault(
        "step-keeps-what-is-not-finite",
        "A sample without a finite gradient is not masked out.",
        "training/passes.py",
        "gradients, norms = gradients.masked(finite), torch.where(finite, norms, 0.0)",
        "norms = torch.where(finite, norms, 0.0)",
        (NOT_FINITE, "audit/test_not_finite.py"),
    ),
    Fault(
        "step-other-masks-in-the-second-pass",
        "Dropout draws anew in the second pass over the chunks.",
        "training/passes.py",
        "    fill_generators(chunk.key, cuda=chunk.group.is_cuda)\n",
        "",
        ("training/test_performance.py::test_a_second_pass_over_the_chunks_draws_the_same_masks",),
    ),
    Fault(
        "mechanism-count-in-clear",
        "The count is observed without noise.",
        MECHANISM,
        "return self.rule.observe(noisy, B, state)",
        "return self.rule.observe(count, B, state)",
        (ALGORITHM_2, EVERY_RULE, ADAPT),
    ),
    Fault(
        "mechanism-noise-without-sensitivity",
        "The gradient's noise is not scaled by S.",
        MECHANISM,
        "            sensitivity=S,\n",
        "            sensitivity=1.0,\n",
        (ALGORITHM_2,),
    ),
    Fault(
        "mechanism-does-not-divide",
        "The released sum is not divided by B.",
        MECHANISM,
        "            scale=1 / B,\n",
        "            scale=1.0,\n",
        (ALGORITHM_2,),
    ),
    Fault(
        "mechanism-forgets-the-count",
        "The count is not in the ledger.",
        MECHANISM,
        'return self.noise if self.rule.bounded else self.noise | {"gradient": 0.0}',
        'return {"gradient": self.noise["gradient"]}',
        (f"{STEP}::test_a_step_that_is_interrupted_is_in_the_ledger", EVERY_RULE),
    ),
    Fault(
        "mechanism-rereads-multipliers",
        "The ledger has another multiplier than the noise, because it is read twice.",
        MECHANISM,
        'return self.noise if self.rule.bounded else self.noise | {"gradient": 0.0}',
        "return self.rule.multipliers(self.t)",
        (f"{STEP}::test_the_ledger_has_the_noise_that_is_added_for_any_answer_of_the_rule",),
    ),
    Fault(
        "mechanism-releases-an-unknown-count",
        "A count that is not in the ledger is released.",
        MECHANISM,
        "if len(count) != self.counts:",
        "if False:",
        (f"{STEP}::test_a_count_that_the_ledger_does_not_know_is_not_released",),
    ),
    Fault(
        "mechanism-counts-without-noise-multiplier",
        "A rule with a statistic but no sigma_count is accepted.",
        MECHANISM,
        "if missing is not None:",
        "if False:",
        ("training/test_bad_input.py",),
    ),
    Fault(
        "run-writes-the-ledger-late",
        "An interrupted step is not in the ledger.",
        "training/run.py",
        "        # Before the step, so that an interrupted step is in the ledger.\n"
        "        self._write(mechanism)\n",
        "",
        (
            f"{STEP}::test_a_step_that_is_interrupted_is_in_the_ledger",
            f"{DRAWS}::test_every_call_is_in_the_ledger",
        ),
    ),
    Fault(
        "run-one-noise-for-all-steps",
        "Every step adds the noise of the first.",
        "training/run.py",
        "self.noise.of(index) if",
        "self.noise.of(0) if",
        (f"{DRAWS}::test_the_difference_of_two_gradients_has_the_noise_of_both",),
    ),
    Fault(
        "run-streams-without-the-data",
        "Runs on neighbouring data share their noise.",
        "training/keys.py",
        '        "data": data_digest,\n',
        "",
        (f"{SEEDS}::test_runs_that_differ_have_other_keys_and_other_noise",),
    ),
    Fault(
        "run-streams-without-the-loss",
        "Runs with other losses share their noise.",
        "training/keys.py",
        '        "loss": config.loss,\n',
        "",
        (f"{SEEDS}::test_runs_that_differ_have_other_keys_and_other_noise",),
    ),
    Fault(
        "run-noise-of-the-step",
        "A second step before the update has the noise of the first.",
        "training/run.py",
        "        noise = self._noise(index)\n",
        "        noise = self._noise(self.t)\n",
        (f"{DRAWS}::test_the_difference_of_two_gradients_has_the_noise_of_both",),
    ),
    Fault(
        "run-batch-of-the-step",
        "A second step before the update has the batch of the first.",
        "training/run.py",
        "self.batches.draw(index, self.state)",
        "self.batches.draw(self.t, self.state)",
        (f"{DRAWS}::test_every_call_has_its_own_batch_in_any_step",),
    ),
    Fault(
        "run-one-mask-for-all-chunks",
        "All chunks of a step have one dropout mask.",
        "training/batches.py",
        'f"draw {t}, chunk {i}, rank',
        'f"draw {t}, rank',
        ("training/test_performance.py::test_every_step_and_chunk_has_masks_of_its_own",),
    ),
    Fault(
        "graph-of-a-random-model",
        "A model that draws random numbers is traced.",
        "training/graph.py",
        "    if random is not None:\n",
        "    if False:\n",
        (f"{GRAPH}::test_where_a_step_has_no_graph_a_sentence_says_why",),
    ),
    Fault(
        "graph-not-compared",
        "The compiled step is used without being compared.",
        "training/graph.py",
        "_TRACED, _COMPARED = 37, (2, 37, 101)",
        "_TRACED, _COMPARED = 37, ()",
        (f"{GRAPH}::test_a_compiler_that_errs_is_not_used",),
    ),
    Fault(
        "graph-takes-another-B",
        "A batch with another divisor takes the graph.",
        "training/graph.py",
        " or self._B != B",
        "",
        (f"{GRAPH}::test_shuffled_batches_of_another_size_take_the_plain_step",),
    ),
    Fault(
        "graph-without-noise",
        "The traced step adds no noise.",
        "training/graph.py",
        "[chunk], self._B, Release(noise))",
        "[chunk], self._B, Release({name: 0 * part for name, part in noise.items()}))",
        (f"{GRAPH}::test_the_traced_step_is_the_step_for_every_rule",),
    ),
    Fault(
        "graph-of-one-size",
        "The mapping fixes the number of samples of the trace of a custom rule.",
        "mechanism/mapping.py",
        "if norms.shape[0] == 0:",
        "if len(norms) == 0:",
        ("training/test_graph.py",),
    ),
    Fault(
        "opacus-forgets-a-piece",
        "Only the last piece of a logical batch is counted.",
        "opacus/clipping.py",
        "self._count = count if self._count is None else self._count + count",
        "self._count = count",
        (f"{OPACUS}::test_a_logical_batch_in_pieces_is_one_release",),
    ),
    Fault(
        "opacus-Z-stands-still",
        "The rule's state is not updated.",
        "opacus/clipping.py",
        "self.state, self.t = following, self.t + 1",
        "self.t = self.t + 1",
        (OPACUS,),
    ),
    Fault(
        "audit-does-not-mask",
        "A group's figures hold samples without a finite gradient.",
        "audit/decomposition.py",
        "if not bool(torch.isfinite(gradients).all()):",
        "if False:",
        ("audit/test_not_finite.py",),
    ),
)

CUSTOM = "mechanism/test_custom_rules.py"
CUSTOM_RULES = (
    Fault(
        "state-changed-in-place",
        "A custom rule's observe changes the state that the step clips with.",
        "mechanism/mechanism.py",
        "given = state.clone()",
        "given = state",
        (CUSTOM,),
    ),
    Fault(
        "bound-changed-in-place",
        "A custom rule's sensitivity changes what the step clips with.",
        "mechanism/mechanism.py",
        'call(self.rule, "sensitivity", now.clone())',
        'call(self.rule, "sensitivity", now)',
        (CUSTOM,),
    ),
    Fault(
        "opacus-reads-bound-again",
        "Inside Opacus, noise is for another S than the one that was enforced.",
        "opacus/clipping.py",
        "if self._bound is None or self._bound[0] is not self.state:",
        "if True:",
        (
            "opacus/test_opacus.py::test_noise_is_for_the_bound_that_was_enforced_and_for_the_multiplier_that_is_accounted",
        ),
    ),
    Fault(
        "step-without-recording",
        "A step outside listening() trains on noise only.",
        "training/run.py",
        "        if not self._is_recording:\n",
        "        if False:\n",
        (CUSTOM,),
    ),
    Fault(
        "infinite-bound",
        "A rule with noise may claim no bound and still get an ε.",
        "mechanism/mechanism.py",
        'or (math.isinf(value) and self.noise["gradient"])',
        "or False",
        (CUSTOM,),
    ),
    Fault(
        "trace-on-another-branch",
        "A compiled step is used for sizes that the trace does not hold for.",
        "training/graph.py",
        "return n >= 2 and self._fits(n)",
        "return n >= 2",
        (
            "training/test_graph.py::test_a_batch_on_another_branch_of_the_model_than_the_traced_one_takes_the_plain_step",
        ),
    ),
)

KEYS = (
    *(
        Fault(
            f"key-without-{name}",
            f"Two runs that differ in {what} draw the same noise.",
            "training/keys.py",
            old,
            new,
            tests,
        )
        for name, what, old, new, tests in (
            (
                "data",
                "one bit of one record",
                '        "data": data_digest,\n',
                "",
                (
                    f"{KEYED}::test_one_bit_of_one_record_changes_the_key",
                    f"{STREAMS}::test_another_start_and_other_data_share_no_noise",
                ),
            ),
            (
                "model",
                "the model",
                '        "model": model,\n',
                "",
                (f"{KEYED}::test_equal_runs_have_one_key_and_others_have_their_own",),
            ),
            (
                "loss",
                "the loss",
                '        "loss": config.loss,\n',
                "",
                (
                    f"{STREAMS}::test_two_runs_that_differ_in_anything_share_no_noise_and_no_batches",
                ),
            ),
            (
                "schedule",
                "the schedule",
                '        "scheduler": config.scheduler,\n',
                "",
                (
                    f"{STREAMS}::test_two_runs_that_differ_in_anything_share_no_noise_and_no_batches",
                ),
            ),
            (
                "machine",
                "the processor or the number of threads",
                "        **machine(device),\n",
                '        **dict.fromkeys(_OWN, ""),\n',
                (f"{KEYED}::test_the_machine_and_the_code_change_the_key",),
            ),
            (
                "ranks",
                "the number of ranks",
                '        "ranks": f"{ranks.world} {ranks.local} {ranks.sharded}",\n',
                "",
                ("distributed/test_ranks.py::test_the_number_of_ranks_changes_the_key",),
            ),
        )
    ),
    Fault(
        "key-of-each-rank",
        "Ranks with other threads draw other batches, so that a record may count twice.",
        "training/keys.py",
        "    return _of_all(ranks.each(own))\n",
        "    return own\n",
        (
            "distributed/test_ranks.py::test_ranks_with_other_threads_draw_the_same_batches",
            "distributed/test_ranks.py::test_ranks_that_compute_different_things_are_refused",
        ),
    ),
    Fault(
        "keys-of-ranks-not-compared",
        "Ranks with different keys train.",
        "training/run.py",
        "        check_one_key(key, self.ranks)\n",
        "",
        ("distributed/test_ranks.py::test_ranks_with_different_keys_are_refused",),
    ),
    Fault(
        "key-for-rows-that-are-not-read",
        "A seed is accepted for data of which only a few rows are in the digest.",
        "training/keys.py",
        "    if isinstance(data, MapDataset):\n",
        "    if False:\n",
        (f"{KEYED}::test_a_seed_is_refused_for_data_that_are_never_read_as_a_whole",),
    ),
    Fault(
        "key-of-what-it-was",
        "The loss of a run with a seed may change, and its noise does not.",
        "training/run.py",
        "        if self._unchanged is not None and self.conditions:\n",
        "        if False:\n",
        (
            f"{UNCHANGED}::test_with_a_seed_a_change_before_the_first_step_is_refused",
            f"{UNCHANGED}::test_an_observer_that_changes_the_loss_is_found",
        ),
    ),
    Fault(
        "data-of-what-they-were",
        "The data of a run with a seed may change, and its noise does not.",
        "training/unchanged.py",
        '            now["data"] = digest(self._data)\n',
        '            now["data"] = self._before["data"]\n',
        (f"{UNCHANGED}::test_with_a_seed_a_change_before_the_first_step_is_refused",),
    ),
    Fault(
        "steps-of-two-threads",
        "Two threads take steps of one run, draw one batch twice and count it once.",
        "training/inputs.py",
        "    if threading.get_ident() != thread:\n",
        "    if False:\n",
        (f"{UNCHANGED}::test_another_thread_takes_no_step",),
    ),
    Fault(
        "steps-under-autocast",
        "A step is taken under autocast, where norms are too small.",
        "training/inputs.py",
        '    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):\n',
        "    if False:\n",
        (f"{UNCHANGED}::test_a_step_is_refused_under_autocast",),
    ),
    Fault(
        "key-for-rows-that-change",
        "A seed is accepted for a class of data that changes its rows.",
        "training/keys.py",
        "        unknown |= {type(data)}\n",
        "        pass\n",
        (f"{KEYED}::test_a_seed_is_refused_for_data_that_change_their_rows",),
    ),
    Fault(
        "key-without-patches",
        "Runs share their noise although one has another function in torch.",
        "training/keys.py",
        '        "patch of torch": patches(),\n',
        "",
        (f"{KEYED}::test_a_function_that_was_put_into_torch_changes_the_key",),
    ),
    Fault(
        "machine-without-switches",
        "Runs share their noise although one flushes subnormal numbers.",
        "training/machine.py",
        """ | {"denormal": _keeps_subnormal_numbers()}""",
        "",
        (f"{KEYED}::test_a_switch_of_torch_changes_the_key",),
    ),
    Fault(
        "library-by-the-name-of-a-function",
        "A function that wraps one of a library has the digest of that one.",
        "training/contents.py",
        "        library = libraries.library_of(value.__globals__)\n"
        "        if library and _is_held(value):\n",
        "        library = libraries.library_of_name(value.__module__)\n        if library:\n",
        (f"{CONTENTS}::test_functions_that_differ_have_different_digests",),
    ),
    Fault(
        "library-by-the-name-of-a-file",
        "A file with the name of a module of Python counts as that module.",
        "training/libraries.py",
        'return top if any(path.is_relative_to(folder) for folder in _standard()) else ""',
        "return top",
        (f"{CONTENTS}::test_a_file_with_the_name_of_a_library_is_none",),
    ),
    Fault(
        "library-by-its-version",
        "A package that was installed again with the same version has the digest it had.",
        "training/libraries.py",
        'yield f"{distribution.name} {distribution.version} {together}"',
        'yield f"{distribution.name} {distribution.version}"',
        (f"{CONTENTS}::test_a_package_that_changes_without_a_new_version_has_another_digest",),
    ),
    Fault(
        "contents-without-names-of-arguments",
        "Functions with the same arguments in another order have one digest.",
        "training/contents.py",
        "(counts, names_and_code, keywords, value.co_consts)",
        "(counts, names_and_code, value.co_consts)",
        (f"{CONTENTS}::test_functions_that_differ_have_different_digests",),
    ),
    Fault(
        "contents-without-exception-tables",
        "Functions that differ in which errors they catch have one digest.",
        "training/contents.py",
        "value.co_code, value.co_exceptiontable",
        "value.co_code",
        (f"{CONTENTS}::test_functions_that_differ_have_different_digests",),
    ),
    Fault(
        "contents-with-names-of-modules",
        "A module of your own is known by its name.",
        "training/contents.py",
        "[value.__name__.encode(), self._pairs(variables)]",
        "[value.__name__.encode()]",
        (f"{CONTENTS}::test_functions_that_differ_have_different_digests",),
    ),
    Fault(
        "contents-as-pickled",
        "Attributes that a class leaves out of its copies are in no digest.",
        "training/contents.py",
        'self._pairs(getattr(value, "__dict__", {}))',
        "b''",
        (f"{CONTENTS}::test_functions_that_differ_have_different_digests",),
    ),
    Fault(
        "contents-without-closures",
        "Two functions that differ in a variable of theirs have one digest.",
        "training/contents.py",
        "            *(self._cell(cell) for cell in value.__closure__ or ()),\n",
        "",
        (f"{KEYED}::test_what_a_function_uses_is_in_its_digest",),
    ),
    Fault(
        "contents-without-globals",
        "Two functions that differ in a global variable have one digest.",
        "training/contents.py",
        "            if name in value.__globals__:\n",
        "            if False:\n",
        (f"{KEYED}::test_what_a_function_uses_is_in_its_digest",),
    ),
    Fault(
        "contents-order-of-sets",
        "The digest depends on the order of a set, which differs between processes.",
        "training/contents.py",
        "items = sorted(self.of(item) for item in value)",
        "items = [self.of(item) for item in value]",
        (f"{KEYED}::test_a_digest_is_the_same_in_every_process",),
    ),
    Fault(
        "mark-without-key",
        "A checkpoint has a plain digest of the data.",
        "training/identity.py",
        "derive(key, f'data {digested}').hex()",
        "digested",
        (
            f"{RESUME}::test_what_may_be_published_holds_no_key",
            f"{RESUME}::test_the_data_fingerprint_is_of_no_use_without_the_key",
        ),
    ),
    Fault(
        "ledger-after-the-draw",
        "A batch is drawn before it is in the ledger and in the journal.",
        "training/run.py",
        "        self._write(mechanism)\n        self.drawn += 1\n"
        "        self._unused = self.run_id, index\n"
        "        B, chunks = self.batches.draw(index, self.state)\n",
        "        B, chunks = self.batches.draw(index, self.state)\n"
        "        self._write(mechanism)\n        self.drawn += 1\n"
        "        self._unused = self.run_id, index\n",
        (f"{BRANCHES}::test_the_file_and_its_folder_are_flushed_before_the_batch_is_drawn",),
    ),
    Fault(
        "journal-not-flushed",
        "The journal may be lost with the power.",
        "training/journal.py",
        "                os.fsync(handle)\n",
        "",
        (f"{BRANCHES}::test_the_file_and_its_folder_are_flushed_before_the_batch_is_drawn",),
    ),
    Fault(
        "journal-not-counted",
        "The steps of a killed process are forgotten.",
        "training/resume.py",
        "    journal, written = _earlier(run, path.parent)\n",
        "    journal, written = Ledger(), []\n",
        (f"{BRANCHES}::test_a_process_that_is_killed_again_and_again_is_counted_each_time",),
    ),
    Fault(
        "journal-of-another-step",
        "A block that is reserved with other noise covers a draw.",
        "training/journal.py",
        "            and entry.is_same_release(draw)\n",
        "",
        (f"{BRANCHES}::test_a_block_has_the_noise_of_each_of_its_steps",),
    ),
    Fault(
        "resume-with-the-old-key",
        "Two continuations of one checkpoint draw the same noise.",
        "training/resume.py",
        "run.set_key(fresh_key(run.ranks), parent)",
        "run.set_key(key, parent)",
        (f"{BRANCHES}::test_two_continuations_of_one_checkpoint_share_nothing",),
    ),
    Fault(
        "resume-without-the-parent",
        "A branch does not say where it began.",
        "training/resume.py",
        "        run.set_key(fresh_key(run.ranks), parent)\n",
        "        run.set_key(fresh_key(run.ranks))\n",
        (f"{BRANCHES}::test_the_union_of_two_branches_counts_their_beginning_once",),
    ),
    Fault(
        "resume-forgets-its-own-process",
        "A run that goes back to a checkpoint forgets the steps that it has taken since.",
        "training/resume.py",
        "Ledger.union(run.ledger, *_ledgers",
        "Ledger.union(*_ledgers",
        (f"{BRANCHES}::test_going_back_to_a_checkpoint_forgets_no_step",),
    ),
    Fault(
        "repeats-differ",
        "A repeated step that comes out otherwise is published with the noise of the first.",
        "training/repeats.py",
        "        elif self._seen[draw] != digest:\n",
        "        elif False:\n",
        (f"{RESUME}::test_a_repeated_step_that_differs_is_stopped_before_anybody_sees_it",),
    ),
    Fault(
        "fork-shares-its-noise",
        "A forked process draws the noise of its parent.",
        "training/run.py",
        "        if self._alone.is_in_fork:\n            self._branch()\n",
        "",
        (f"{BRANCHES}::test_a_forked_process_draws_its_own_noise",),
    ),
    Fault(
        "fork-by-process-numbers",
        "A forked process with the number of its parent draws the noise of its parent.",
        "training/alone.py",
        "return self._is_forked or os.getpid()",
        "return os.getpid()",
        (f"{COPIED}::test_a_forked_process_with_the_number_of_its_parent_has_another_key",),
    ),
    Fault(
        "noise-is-copied",
        "A copy of the noise of a run draws the same noise.",
        "mechanism/words.py",
        "    def __reduce_ex__(",
        "    def _reduce_ex(",
        (f"{COPIED}::test_what_holds_a_key_is_not_copied",),
    ),
    Fault(
        "step-of-another-run",
        "A run is updated with the steps of another run, which its ledger lacks.",
        "training/inputs.py",
        "    if (step.run_id, step.draw) != unused:\n",
        "    if False:\n",
        (f"{ANOTHER}::test_a_copy_refuses_the_steps_of_its_run",),
    ),
    Fault(
        "step-used-twice",
        "A step may be used by two updates.",
        "training/run.py",
        "        self._unused = None\n        self._update(",
        "        self._update(",
        (f"{ANOTHER}::test_a_step_is_used_once_and_only_the_last_one",),
    ),
    Fault(
        "key-without-compiling",
        "A compiled step and the plain step that replaces it have one noise.",
        "training/run.py",
        ', "compiled": str(self._graph is not None)}',
        ', "compiled": "asked for"}',
        (f"{SEEDS}::test_a_run_whose_step_is_not_compiled_has_another_key",),
    ),
    Fault(
        "key-without-the-compiler",
        "Two settings of the compiler have one noise.",
        "training/run.py",
        '"compiler": compiler()',
        '"compiler": ""',
        (f"{SEEDS}::test_settings_of_the_compiler_change_the_key",),
    ),
    Fault(
        "fallback-compiles-again",
        "A run whose blocks are fixed for plain steps takes compiled steps later.",
        "training/run.py",
        "        self._takes_plain_steps = True\n",
        "",
        (f"{SEEDS}::test_a_run_that_fell_back_takes_plain_steps_to_its_end",),
    ),
    Fault(
        "patches-under-another-name",
        "One of torch's functions in the place of another is not seen.",
        "training/foreign.py",
        "    if (function.__module__, function.__qualname__) != (home, place):\n",
        "    if False:\n",
        (f"{PATCHED}::test_what_is_put_into_torch_changes_the_digest",),
    ),
    Fault(
        "patches-without-objects",
        "A partial function in the place of a function of torch is not seen.",
        "training/foreign.py",
        "    if is_made_of_others or not libraries.library_of_class(type(part)):\n",
        "    if not libraries.library_of_class(type(part)):\n",
        (f"{PATCHED}::test_what_two_objects_call_is_in_their_digests",),
    ),
    Fault(
        "patches-without-defaults",
        "Another default of a function of torch is not seen.",
        "training/patches.py",
        "        known += _constants(owner)\n",
        "",
        (f"{PATCHED}::test_what_is_put_into_torch_changes_the_digest",),
    ),
    Fault(
        "hooks-of-all-modules",
        "A hook for all modules acts in a run with a seed.",
        "training/interventions.py",
        "    _raise_first(_hooks())\n",
        "",
        (f"{PATCHED}::test_what_acts_in_every_computation_is_refused_with_a_seed",),
    ),
    Fault(
        "operators-registered-anew",
        "Another operator of torch acts in a run with a seed.",
        "training/interventions.py",
        "    _raise_first(_operators())\n",
        "",
        (f"{PATCHED}::test_what_acts_in_every_computation_is_refused_with_a_seed",),
    ),
    Fault(
        "modes-between-two-steps",
        "A mode that is entered inside the loop acts in a run with a seed.",
        "training/run.py",
        "            check_modes()\n",
        "            pass\n",
        (f"{PATCHED}::test_a_mode_inside_the_loop_is_refused",),
    ),
    Fault(
        "opacus-in-bfloat16",
        "An Opacus loop divides by the number of records in bfloat16.",
        "opacus/clipping.py",
        "    if dtype.itemsize < torch.float32.itemsize:\n",
        "    if dtype == torch.float16:\n",
        (f"{BFLOAT16}::test_a_model_in_bfloat16_is_refused",),
    ),
    Fault(
        "opacus-under-autocast",
        "An Opacus loop divides by the number of records in the precision of autocast.",
        "opacus/optimizer.py",
        "    refuse_autocast(modules)\n",
        "",
        (f"{BFLOAT16}::test_a_pass_under_autocast_is_refused",),
    ),
    Fault(
        "copy-shares-its-noise",
        "A copy of a run draws the noise of the run.",
        "training/run.py",
        "        self.set_key(os.urandom(KEY_BYTES), self.place)\n",
        "        self.set_key(derive(self.run_id.encode(), 'copy'), self.place)\n",
        (f"{BRANCHES}::test_a_copy_is_a_branch", f"{BRANCHES}::test_two_copies_share_nothing"),
    ),
    Fault(
        "copy-without-its-model",
        "A copy of a run trains a vector that its model does not see.",
        "training/update.py",
        "            self._view(self._joined.data)\n",
        "            pass\n",
        (f"{BRANCHES}::test_a_deep_copy_trains_its_own_model",),
    ),
)

ATTEMPTS = (
    Fault(
        "journal-of-one-attempt",
        "An exact resume replaces the lines of the attempt before it.",
        "training/journal.py",
        "        return self.attempt, self.run\n",
        '        return "", self.run\n',
        (
            f"{BRANCHES}::test_an_exact_attempt_that_ends_earlier_erases_no_step_of_the_one_before",
            f"{BRANCHES}::test_a_repeated_step_that_differs_erases_no_step",
        ),
    ),
    Fault(
        "restore-within-one-attempt",
        "Going back to a checkpoint exactly erases the steps since.",
        "training/journal.py",
        "        self.reserved, self._attempt = [], os.urandom(8).hex()\n",
        "        self.reserved = []\n",
        (f"{BRANCHES}::test_going_back_exactly_within_a_process_erases_no_step",),
    ),
    Fault(
        "journal-of-another-place",
        "A draw is made in the place of another step of the same key.",
        "training/run.py",
        "        check_place(self.ledger, draw)\n",
        "",
        (f"{BRANCHES}::test_a_draw_with_another_noise_than_it_had_is_not_made",),
    ),
    Fault(
        "journal-shortened",
        "A journal that lost lines is believed.",
        "training/journal.py",
        '    if _fingerprint(content[: kept["bytes"]]) != kept:\n',
        "    if False:\n",
        (
            f"{BRANCHES}::test_a_journal_that_lost_lines_is_refused",
            f"{FILES}::test_a_shortened_journal_is_refused",
        ),
    ),
    Fault(
        "journal-without-its-last-line",
        "A last line without its end is no line.",
        "training/journal.py",
        "    if _is_complete(last):\n",
        "    if False:\n",
        (f"{BRANCHES}::test_a_last_line_that_lost_its_end_counts",),
    ),
    Fault(
        "journal-crosses-out",
        "A complete last line without its end is crossed out.",
        "training/journal.py",
        '        return b"\\n" if _is_complete(last) else _VOID + b"\\n"\n',
        '        return _VOID + b"\\n"\n',
        (f"{BRANCHES}::test_a_last_line_that_lost_its_end_counts",),
    ),
    Fault(
        "journal-unchecked",
        "A line of the journal may take steps back.",
        "training/journal.py",
        "        check_entry(entry, place)\n",
        "",
        (f"{BRANCHES}::test_a_line_with_impossible_values_is_damaged",),
    ),
    Fault(
        "journal-begins-late",
        "Steps before the journal are in no file.",
        "training/run.py",
        "        self._journal.adopt(self.ledger, self.declarations, self.settings.steps)\n",
        "",
        (f"{BRANCHES}::test_steps_before_the_journal_are_written_into_it",),
    ),
    Fault(
        "durable-from-now-on",
        "A run that took steps without a journal says that it covers all attempts.",
        "training/run.py",
        "            self.is_on_disk = False\n",
        "            pass\n",
        (f"{BRANCHES}::test_steps_without_a_journal_are_remembered",),
    ),
    Fault(
        "durable-forgotten",
        "A resumed run does not know that steps were taken without a journal.",
        "training/resume.py",
        ' and published["durable"]\n',
        "\n",
        (f"{BRANCHES}::test_steps_without_a_journal_are_remembered",),
    ),
    Fault(
        "durable-elsewhere",
        "A checkpoint counts on the journal of another folder.",
        "training/run.py",
        " and self._journal.is_in(folder)\n",
        "\n",
        (f"{BRANCHES}::test_a_checkpoint_in_another_folder_than_its_journal_is_not_durable",),
    ),
    Fault(
        "checkpoint-of-fewer-draws",
        "A second checkpoint of a step is not written.",
        "checkpoint.py",
        "    if same and _is_saved(same[-1], checkpoint):\n",
        "    if same:\n",
        (f"{BRANCHES}::test_a_second_checkpoint_of_a_step_has_the_draws_since_the_first",),
    ),
    Fault(
        "folder-not-flushed",
        "A new folder may be lost with the power, and the journal in it.",
        "checkpoint.py",
        "            synchronise(path.parent)\n",
        "            pass\n",
        (f"{BRANCHES}::test_every_new_folder_is_on_the_disk",),
    ),
    Fault(
        "resume-without-checkpoint-repeats",
        "Without a checkpoint, a resume draws the noise of the seed again.",
        "training/resume.py",
        "    if run.ledger.entries and not exact:\n",
        "    if False:\n",
        (f"{BRANCHES}::test_new_noise_also_before_the_first_checkpoint",),
    ),
    Fault(
        "repeats-without-digests",
        "Steps are repeated without what they are compared with.",
        "training/run.py",
        "                self._repeats.check_held(self.drawn, made(folder, self.run_id), end)\n",
        "                self._repeats.check_held(self.drawn, 0, 0)\n",
        (f"{RESUME}::test_without_the_digests_no_step_is_repeated",),
    ),
    Fault(
        "repeats-not-flushed",
        "Digests of whole blocks may be lost with the power.",
        "training/run.py",
        "            self._repeats.flush()\n        journal.reserve",
        "            pass\n        journal.reserve",
        (f"{RESUME}::test_digests_are_on_the_disk_before_the_next_block",),
    ),
    Fault(
        "ledger-with-gaps",
        "A ledger without its first steps is whole.",
        "mechanism/ledger.py",
        "            if entry.run and entry.end > held[entry.run]:\n",
        "            if False:\n",
        (
            f"{LEDGERS}::test_a_whole_ledger_has_every_draw_from_the_first_one_on",
            f"{FILES}::test_ledgers_that_lack_steps_are_refused",
        ),
    ),
    Fault(
        "ledger-with-a-cycle",
        "Two runs may be the beginning of each other.",
        "mechanism/ledger.py",
        "        if run in _ancestors(run, parents):\n",
        "        if False:\n",
        (f"{LEDGERS}::test_runs_that_are_resumed_from_each_other_are_refused",),
    ),
    Fault(
        "ledger-without-a-release",
        "A step without a release costs nothing.",
        "mechanism/entry.py",
        '    if not given["multipliers"]:\n',
        "    if False:\n",
        (f"{LEDGERS}::test_a_damaged_entry_is_named",),
    ),
    Fault(
        "remaining-forgotten",
        "A repeated draw stands for a declared step.",
        "mechanism/statement.py",
        "    if facts is not None and facts.remaining is not None:\n",
        "    if False:\n",
        ("mechanism/test_statement.py::test_repeated_draws_do_not_stand_for_declared_steps",),
    ),
    Fault(
        "files-without-reserved",
        "Steps that a checkpoint wrote ahead do not count on the command line.",
        "cli/ledgers.py",
        '    return Ledger.joined(ledger, Ledger.from_json(facts.get("reserved", [])))\n',
        "    return ledger\n",
        (f"{FILES}::test_a_killed_run_is_counted_from_any_of_its_files",),
    ),
    Fault(
        "files-without-remaining",
        "A run that was stopped early costs its drawn steps only.",
        "cli/epsilon.py",
        "    covered = Ledger.joined(ledger, ledgers.remaining(held, ledger))\n",
        "    covered = ledger\n",
        (f"{FILES}::test_a_run_that_was_stopped_early_costs_what_its_report_states",),
    ),
    Fault(
        "files-emptied",
        "A report whose ledger was emptied costs nothing.",
        "cli/ledgers.py",
        "    if stated is not None and stated != ledger.steps:\n",
        "    if False:\n",
        (f"{FILES}::test_ledgers_that_lack_steps_are_refused",),
    ),
    Fault(
        "opacus-gap",
        "An interrupt in an Opacus step leaves a draw that is in no ledger.",
        "opacus/optimizer.py",
        "        index = draws.count\n        self.ledger",
        "        index = draws.take()\n        self.ledger",
        ("opacus/test_opacus.py::test_an_interrupt_at_the_ledger_leaves_no_gap",),
    ),
    Fault(
        "threads-of-the-environment",
        "Stored runs of one name have different noise.",
        "sweep/bundle.py",
        "    torch.set_num_threads(1)\n",
        "    torch.set_num_threads(int(__import__('os').environ.get('EVENCLIP_THREADS', 1)))\n",
        ("sweep/test_process.py::test_the_threads_of_the_environment_change_no_result",),
    ),
)

DECLARED = (
    Fault(
        "declared-not-written",
        "A journal states no declared steps.",
        "training/run.py",
        "declared = None if journal.has_declared(self.run_id, shift) else declaration(self)\n",
        "declared = None\n",
        (f"{DECLARATIONS}::test_every_choice_of_files_costs_the_declared_steps",),
    ),
    Fault(
        "declared-once",
        "Repeated draws stand for declared steps in a journal.",
        "training/run.py",
        "return None if known or not journal.reserved else declaration(self)\n",
        "return None\n",
        (f"{DECLARATIONS}::test_repeated_draws_are_declared_anew_when_a_loop_ends",),
    ),
    Fault(
        "declared-not-read",
        "`evenclip epsilon` does not read the declarations of a journal.",
        "cli/ledgers.py",
        "        tuple(one.remaining for one in declared),\n",
        "        (),\n",
        (f"{DECLARATIONS}::test_every_choice_of_files_costs_the_declared_steps",),
    ),
    Fault(
        "declared-nowhere",
        "A journal without declarations is taken for a complete run.",
        "cli/epsilon.py",
        "    ledgers.check_declared(held, ledger)\n",
        "",
        (
            f"{DECLARATIONS}::test_a_journal_without_declarations_is_refused_or_read_with_those_of_another_file",
        ),
    ),
    Fault(
        "declared-without-a-reason",
        "The journal of a rule without an ε has one.",
        "cli/ledgers.py",
        "        why=next((one.why_no_epsilon for one in declared if one.why_no_epsilon), None),\n",
        "",
        (f"{DECLARATIONS}::test_the_journal_of_a_rule_without_an_epsilon_has_none",),
    ),
    Fault(
        "declared-before-the-first-checkpoint",
        "An attempt before the first checkpoint declared nothing.",
        "training/resume.py",
        "    run.declarations = declared\n",
        "",
        (
            f"{DECLARATIONS}::test_a_shorter_attempt_does_not_replace_the_declaration_of_a_longer_one",
        ),
    ),
    Fault(
        "declared-before-a-checkpoint",
        "A resumed run forgets what earlier attempts declared.",
        "training/resume.py",
        "    run.declarations = [*run.declarations, *declared]\n",
        "",
        (
            f"{DECLARATIONS}::test_a_copy_of_a_checkpoint_without_its_journal_declares_what_it_knows",
            f"{DECLARATIONS}::test_going_back_within_a_process_keeps_what_was_declared",
        ),
    ),
    Fault(
        "declared-by-an-older-version",
        "A run resumes from a journal that declares nothing.",
        "training/resume.py",
        "    _check_declared(folder, run.ledger, journal, {one.run for one in declared})\n",
        "",
        (
            f"{DECLARATIONS}::test_a_folder_of_an_older_version_is_resumed_only_where_its_steps_are_known",
        ),
    ),
    Fault(
        "declared-by-a-rule-without-epsilon",
        "Steps of a rule without an ε count as private ones.",
        "training/resume.py",
        "    _check_epsilon(run, folder, declared)\n",
        "",
        (f"{DECLARATIONS}::test_the_journal_of_a_rule_without_an_epsilon_has_none",),
    ),
    Fault(
        "declared-by-a-longer-attempt",
        "A shorter attempt stands for the longer one before it.",
        "training/resume.py",
        "    if run.settings.steps < last.steps or not drawn:\n",
        "    if not drawn:\n",
        (
            f"{DECLARATIONS}::test_a_shorter_attempt_does_not_replace_the_declaration_of_a_longer_one",
        ),
    ),
    Fault(
        "declared-elsewhere",
        "A new journal does not have the declarations of a checkpoint.",
        "training/journal.py",
        "                mine = [one for one in declared if one.run == run]\n",
        "                mine = list[Declaration]()\n",
        (
            f"{DECLARATIONS}::test_a_copy_of_a_checkpoint_without_its_journal_declares_what_it_knows",
        ),
    ),
    Fault(
        "declared-in-the-report",
        "The report has the declaration of the last attempt only.",
        "training/result.py",
        "remaining=run.open_declarations.to_json()",
        "remaining=run.remaining.to_json()",
        (
            f"{DECLARATIONS}::test_a_shorter_attempt_does_not_replace_the_declaration_of_a_longer_one",
        ),
    ),
    Fault(
        "declared-in-a-checkpoint",
        "A checkpoint has the declaration of the last attempt only.",
        "training/resume.py",
        '"remaining": run.open_declarations.to_json()',
        '"remaining": run.remaining.to_json()',
        (
            f"{DECLARATIONS}::test_a_copy_of_a_checkpoint_without_its_journal_declares_what_it_knows",
        ),
    ),
    Fault(
        "declared-last",
        "The last declaration replaces a larger one.",
        "mechanism/declared.py",
        "rest[run] |= +Counter(",
        "rest[run] = +Counter(",
        (f"{DECLARATIONS}::test_no_file_lowers_what_epsilon_covers",),
    ),
    Fault(
        "declared-met-twice",
        "A step of a branch stands for two declared steps of one run.",
        "mechanism/declared.py",
        "own = (rest.get(run, Counter[Entry]()) | chains[run]) + taken",
        "own = rest.get(run, Counter[Entry]()) + chains[run] + taken",
        (f"{DECLARATIONS}::test_no_file_lowers_what_epsilon_covers",),
    ),
    Fault(
        "declared-with-other-noise",
        "A step with more noise stands for a declared one.",
        "mechanism/declared.py",
        "multipliers, sizes = tuple(sorted(entry.multipliers)), tuple(sorted(entry.sizes))",
        'multipliers, sizes = (("gradient", 9.0),), tuple(sorted(entry.sizes))',
        (f"{DECLARATIONS}::test_an_attempt_with_more_noise_does_not_stand_for_declared_steps",),
    ),
    Fault(
        "declared-by-an-absent-parent",
        "A file that links two runs lowers ε.",
        "mechanism/declared.py",
        "parent is not None and parent[1] > 0",
        "parent is not None",
        (f"{DECLARATIONS}::test_no_file_lowers_what_epsilon_covers",),
    ),
    Fault(
        "declared-partly-kept",
        "A report keeps less than what counts.",
        "mechanism/declared.py",
        "kept[run] = Counter({kind: rest[run][kind] for kind in kinds})",
        "kept[run] = kinds",
        (f"{DECLARATIONS}::test_keeping_declarations_with_a_ledger_changes_nothing",),
    ),
    Fault(
        "extended-unsaid",
        "A run that was extended does not say so.",
        "mechanism/statement.py",
        "    if drawn and first < planned:\n",
        "    if False:\n",
        (f"{DECLARATIONS}::test_a_run_that_is_extended_says_so",),
    ),
    Fault(
        "extended-twice",
        "A run that was extended twice forgets what was declared at first.",
        "training/resume.py",
        'run.first_steps = published.get("first_steps", published["settings"]["steps"])',
        'run.first_steps = published["settings"]["steps"]',
        (f"{DECLARATIONS}::test_a_run_that_is_extended_says_so",),
    ),
    Fault(
        "extended-in-the-journal",
        "A run that was extended before its first checkpoint does not say so.",
        "training/resume.py",
        "    run.first_steps = last.first_steps\n",
        "",
        (f"{DECLARATIONS}::test_a_journal_keeps_what_was_declared_at_first",),
    ),
)

FILES = (
    Fault(
        "private-files-readable",
        "Everyone may read private files.",
        "files/kinds.py",
        "return 0o644 if self.public else 0o600",
        "return 0o644",
        (
            f"{RESUME}::test_the_secret_file_is_for_its_owner_alone",
            "files/test_write.py::test_private_files_are_for_their_owner_and_public_ones_for_all",
        ),
    ),
    Fault(
        "damaged-file-believed",
        "A damaged file is loaded.",
        "files/seal.py",
        'if hashlib.sha256(content).hexdigest() != stated.get("sha256"):',
        "if False:",
        (
            f"{RESUME}::test_a_damaged_file_is_named_and_the_checkpoint_before_it_still_loads",
            "export/test_export.py::test_a_flipped_bit_or_another_models_file_is_named",
        ),
    ),
    Fault(
        "changed-json-believed",
        "JSON with another checksum is read.",
        "files/seal.py",
        "if verify and stated != _checksum(value):",
        "if False:",
        ("files/test_seal.py::test_no_flipped_bit_changes_the_value",),
    ),
    Fault(
        "seal-forgets-values",
        "The checksum covers only the names of the values.",
        "files/seal.py",
        'canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))',
        "canonical = json.dumps(sorted(value))",
        ("files/test_seal.py::test_no_flipped_bit_changes_the_value",),
    ),
    Fault(
        "folder-of-something-else",
        "The folder of another run is read.",
        "files/seal.py",
        "if stated.get(name) != value:",
        "if False:",
        (
            "files/test_folder.py::test_a_folder_of_something_else_is_refused",
            "sweep/test_store.py::test_the_result_of_another_run_is_not_believed",
        ),
    ),
    Fault(
        "folder-in-place",
        "A folder is visible before it is complete.",
        "files/folder.py",
        "with scratch_folder(place.parent, kind.folder_mode) as scratch:",
        "with __import__('contextlib').nullcontext(make_folder(place, kind)) as scratch:",
        (f"{RESUME}::test_nothing_is_a_checkpoint_before_it_is_whole",),
    ),
    Fault(
        "replaced-in-two-steps",
        "While a folder is replaced, there is a moment without one.",
        "files/folder.py",
        "    if _exchange(scratch, place):\n",
        "    if False:\n",
        ("files/test_folder.py::test_there_is_a_whole_folder_after_every_operation",),
    ),
    Fault(
        "links-replaced",
        "A link is replaced by a file.",
        "files/write.py",
        "    if stat.S_ISLNK(mode):\n",
        "    if False:\n",
        ("files/test_write.py::test_a_link_is_neither_followed_nor_replaced",),
    ),
    Fault(
        "leftovers-of-the-living",
        "Scratch files of running commands are removed.",
        "files/write.py",
        "        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        (
            "files/test_write.py::test_leftovers_of_dead_processes_are_removed_and_those_of_live_ones_kept",
        ),
    ),
    Fault(
        "private-rows-stay",
        "Rows for workers stay when their process is killed.",
        "files/private.py",
        "    shutil.rmtree(sys.argv[1], ignore_errors=True)",
        "    pass",
        ("files/test_folder.py::test_private_rows_are_removed_when_their_process_is_killed",),
    ),
    Fault(
        "damaged-result-drawn",
        "A changed results.json is drawn.",
        "cli/report.py",
        "verify=not unverified)",
        "verify=False)",
        ("report/test_page.py::test_changed_results_are_drawn_only_with_a_mark",),
    ),
    Fault(
        "unmarked-page",
        "A page of unverified results has no mark.",
        "report/page.py",
        "[_unverified()] if unverified else []",
        "[]",
        ("report/test_page.py::test_changed_results_are_drawn_only_with_a_mark",),
    ),
)

STARTING, OUTPUT = "faults/test_processes.py", "faults/test_output.py"
PROCESSES, LISTING = f"{STARTING}::test_a_fault_of_processes", "sweep/test_process.py"
STARTED = (
    Fault(
        "worker-empty-entry",
        "An empty entry of PYTHONPATH stays, and workers import from the current folder.",
        "sweep/process.py",
        "split(os.pathsep) if folder]",
        "split(os.pathsep)]",
        (f"{LISTING}::test_a_worker_does_not_import_from_the_current_folder",),
    ),
    Fault(
        "module-current-folder",
        "`python -m evenclip` imports from the current folder.",
        "evenclip/__main__.py",
        "    _leave_current_folder()\n    from",
        "    from",
        (f"{PROCESSES}[planted: epsilon, -m]",),
    ),
    Fault(
        "file-changed-since",
        "A file that changed after it was hashed is executed.",
        "sweep/describe/files.py",
        'if hashlib.sha256(read).hexdigest() != description["sha256"]:',
        "if False:",
        (f"{PROCESSES}[edited before a worker: rule]",),
    ),
    Fault(
        "rule-changed-since",
        "A rule that was edited after its import is accepted.",
        "describe/rule.py",
        "    if _digest(rule) != _digest(make_rule(description)):",
        "    if False:",
        (f"{PROCESSES}[edited: a constant]",),
    ),
    Fault(
        "file-neighbour",
        "A file may import one beside it, which no hash covers.",
        "sweep/describe/files.py",
        "and _is_beside(Path(file).resolve(), folder)",
        "and False",
        (f"{PROCESSES}[imports its neighbour by its path]",),
    ),
    Fault(
        "rows-stay",
        "The rows of a DataFrame stay in the store.",
        "comparison/source.py",
        "yield _written(data, folder) if is_frame",
        "yield _written(data, store.root) if is_frame",
        (f"{PROCESSES}[rows: frame, SIGKILL]",),
    ),
    Fault(
        "rows-of-earlier-versions",
        "Rows that earlier versions left in the store stay there.",
        "comparison/source.py",
        "        path.unlink(missing_ok=True)",
        "        pass",
        (f"{PROCESSES}[rows of earlier versions]",),
    ),
    Fault(
        "lock-link",
        "A link in the place of a lock file is followed.",
        "sweep/store.py",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDWR | os.O_CREAT | os.O_NONBLOCK",
        (f"{PROCESSES}[a link as lock: file]",),
    ),
    Fault(
        "library-wrapper",
        "What a library wraps around a function of your own is known by its name alone.",
        "training/contents.py",
        "return is_held and bool(libraries.library_of_name(value.__module__))",
        "return is_held",
        ("training/test_contents.py",),
    ),
    Fault(
        "terminal-controls",
        "A character of the data controls the terminal.",
        "evenclip/terminal.py",
        "    return _UNSAFE.sub(_escape, str(text))",
        "    return str(text)",
        (f"{OUTPUT}::test_a_fault_of_output[compared: ANSI]",),
    ),
    Fault(
        "terminal-encoding",
        "A terminal without ε fails.",
        "evenclip/terminal.py",
        "            reconfigure(errors=_ERRORS)",
        "            pass",
        (f"{OUTPUT}::test_a_fault_of_output[spelled]",),
    ),
    Fault(
        "progress-markup",
        "Names change the progress display by markup.",
        "report/live.py",
        'Text(f"  failed: {line}")',
        'f"  failed: {line}"',
        (f"{OUTPUT}::test_a_fault_of_output[progress: closing markup, utf-8, True]",),
    ),
)

DISTINCT, ARGUMENTS = "data/test_distinct.py", "test_arguments.py"
INPUTS = (
    Fault(
        "same-file-twice",
        "A file that is named by a link counts twice.",
        "data/distinct.py",
        "        if place in known:\n",
        "        if False:\n",
        (f"{DISTINCT}::test_a_parquet_file_is_named_once",),
    ),
    Fault(
        "same-rows-twice",
        "Files of the same rows in another order count twice.",
        "data/distinct.py",
        "rows[0] >= _FEW and rows in known",
        "False",
        (f"{DISTINCT}::test_the_rows_of_a_parquet_file_are_not_counted_twice",),
    ),
    Fault(
        "torch-dataset-twice",
        "A part of a torch dataset that occurs twice counts twice.",
        "data/dataset.py",
        "if len({id(part) for part in parts}) < len(parts):",
        "if False:",
        (f"{DISTINCT}::test_torch_datasets_do_not_repeat_records",),
    ),
    Fault(
        "ledger-name-twice",
        "Of a name that occurs twice in an entry, the last value counts.",
        "files/strict.py",
        "    if len(made) < len(pairs):\n",
        "    if False:\n",
        ("cli/test_epsilon_files.py::test_a_ledger_that_was_made_by_hand_is_checked",),
    ),
    Fault(
        "ledger-negative-multiplier",
        "A multiplier below 0 counts as one above 0.",
        "mechanism/entry.py",
        "        if not 0 <= m < math.inf:\n",
        "        if False:\n",
        ("cli/test_epsilon_files.py::test_a_ledger_that_was_made_by_hand_is_checked",),
    ),
    Fault(
        "kinds-unchecked",
        "A value of another kind than its annotation is taken.",
        "arguments.py",
        "if name in values and not _fits(values[name], hint):",
        "if False:",
        (f"{ARGUMENTS}::test_a_value_of_another_kind_is_refused",),
    ),
)

NEW_ROWS = (
    Fault(
        "unreadable-in-silence",
        "Values that cannot be read count as missing, and nothing says so.",
        "data/columns.py",
        "unreadable=int(unreadable.sum()),",
        "unreadable=0,",
        ("faults/test_predict.py::test_the_short_campaign",),
    ),
    Fault(
        "unseen-in-silence",
        "Categories that training did not have are not counted.",
        "data/columns.py",
        "unseen=int(strange.sum()),",
        "unseen=0,",
        ("faults/test_predict.py::test_the_short_campaign",),
    ),
    Fault(
        "unreadable-columns-are-used",
        "A column of which no value can be read is not refused.",
        "data/reading.py",
        "return self.unreadable > 0 and self.unreadable + self.missing == self.rows",
        "return False",
        ("faults/test_predict.py::test_a_column_that_cannot_be_read_is_refused",),
    ),
    Fault(
        "now-is-a-date",
        "A text without a digit is a date, such as now.",
        "data/values.py",
        "shape = _DAY if form == ISO else _DIGIT",
        "shape = re.compile('.*')",
        ("faults/test_predict.py::test_the_short_campaign",),
    ),
    Fault(
        "infinite-weights",
        "A model with weights that are NaN or infinite is loaded.",
        "export/predict.py",
        "        _check_finite(self.model)\n",
        "",
        ("faults/test_predict.py::test_a_model_with_weights_that_are_no_numbers_is_refused",),
    ),
    Fault(
        "too-few-class-names",
        "A model may have more outputs than classes, and a probability is dropped.",
        "export/predict.py",
        "    if outputs != [1, len(classes)]:",
        "    if False:",
        ("faults/test_predict.py::test_class_names_match_the_outputs",),
    ),
    Fault(
        "swallowed-rows",
        "Two stray quotes make one text of hundreds of rows.",
        "data/lines.py",
        "            _check_swallowed(file, separator, row)\n",
        "",
        ("faults/test_tables.py::test_what_is_wrong_is_said_with_its_line",),
    ),
    Fault(
        "short-rows",
        "A line with too few fields is filled with missing values.",
        "data/lines.py",
        "    if fields != width:\n",
        "    if fields > width:\n",
        ("faults/test_tables.py::test_what_is_wrong_is_said_with_its_line",),
    ),
    Fault(
        "damaged-feather",
        "A Feather file is used without validation, and a flipped bit ends the process.",
        "data/stored.py",
        "        table.validate(full=True)\n",
        "",
        ("faults/test_tables.py::test_the_short_campaign",),
    ),
    Fault(
        "predictions-replace-the-model",
        "Predictions may be written into the model's folder.",
        "cli/predict.py",
        "    if same or any(folder.samefile(model) for folder in above):",
        "    if False:",
        ("faults/test_predict.py::test_predictions_never_replace_the_model_or_the_input",),
    ),
    Fault(
        "formulas",
        "A text that begins with a formula is written as it is for spreadsheets.",
        "cli/predict.py",
        "and _FORMULA.match(cell) else cell",
        "and False else cell",
        ("faults/test_predict.py::test_formulas_are_texts_for_spreadsheets",),
    ),
)

FAULTS = (
    *INPUTS,
    *CUSTOM_RULES,
    *CORE,
    *RULES,
    *BOUNDS,
    *GRADIENTS,
    *LEDGER,
    *SAMPLES,
    *NOISE,
    *STATEMENT,
    *TABLES,
    *AUDIT,
    *RANKS,
    *KEYS,
    *ATTEMPTS,
    *DECLARED,
    *FILES,
    *STARTED,
    *NEW_ROWS,
)


def planted(fault: Fault, root: Path) -> None:
    """Change the copy of the package in `root`.

    Raises:
        NotPlanted: the file or the text is not there exactly once.
    """
    files = [
        path for path in sorted(root.rglob("*.py")) if path.as_posix().endswith(f"/{fault.file}")
    ]
    if len(files) != 1:
        raise NotPlanted(f"{len(files)} files end in {fault.file}")
    text = files[0].read_text(encoding="utf-8")
    if text.count(fault.old) != 1 or not fault.old:
        raise NotPlanted(
            f"the text occurs {text.count(fault.old)} times in {fault.file}: "
            f"{fault.old.strip()[:60]!r}"
        )
    files[0].write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def run_tests(fault: Fault, source: Path) -> tuple[int, str]:
    """Return the exit status and the output of the fault's tests, on the package in `source`."""
    places = [(ROOT / "tests" / test).as_posix() for test in fault.tests]
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    options += [f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *places],
        cwd=ROOT,
        text=True,
        check=False,
        timeout=TIMEOUT,
        env=os.environ
        | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def verdict(fault: Fault) -> tuple[str, str]:
    """Return 'caught', 'missed' or 'broken', and the reason."""
    with tempfile.TemporaryDirectory(prefix="evenclip-fault-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            planted(fault, source)
            status, output = run_tests(fault, source)
        except NotPlanted as error:
            return "broken", str(error)
        except subprocess.TimeoutExpired:
            return "broken", f"its tests took more than {TIMEOUT:g} s"
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if status == 0:
        return "missed", f"its tests pass ({last})"
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    if status != FAILED or not failed or re.search(r"^ERROR ", output, re.MULTILINE):
        return "broken", f"its tests do not run: {last}"
    return "caught", failed[0].removeprefix("tests/")


def main() -> None:
    """Plant the faults and print whether each is caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only faults whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    parser.add_argument("--at-once", type=int, default=2, help="faults that are tried at a time")
    given = parser.parse_args()
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names), "two faults have one name"
    chosen = [
        fault
        for fault in FAULTS
        if not given.names or any(word in fault.name for word in given.names)
    ]
    if not chosen:
        parser.error(f"no fault has a name with {' or '.join(given.names)}; see --list")
    if given.list:
        for fault in chosen:
            print(f"{fault.name:36} {fault.wrong}")
        return
    verdicts = []
    with ThreadPoolExecutor(given.at_once) as pool:
        for fault, (outcome, reason) in zip(chosen, pool.map(verdict, chosen), strict=True):
            verdicts.append(outcome)
            print(f"{outcome:7} {fault.name:36} {reason}", flush=True)
    broken = f", {verdicts.count('broken')} broken" if "broken" in verdicts else ""
    print(f"{verdicts.count('caught')} caught, {verdicts.count('missed')} missed{broken}")
    sys.exit(verdicts.count("caught") < len(verdicts))


if __name__ == "__main__":
    main()
