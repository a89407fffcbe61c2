"""What a model or a loss holds besides its trained parameters, which no step may change.

A running mean, a layer that initialises itself from its first batch, or a record kept in an
attribute would leave with the model without noise, and would make a later step depend on an earlier
batch. So buffers, parameters and other tensors must be as they were after every pass: a model that
changes one is refused by name. Everything else that code can keep (`evenclip.gradients.places`),
such as a counter or a cache, is put back to what it was.

Tensors are compared by identity, by torch's count of changes in place, and by a sum of their bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from evenclip.gradients.bits import sums
from evenclip.gradients.errors import ModelError
from evenclip.gradients.losses import user_loss
from evenclip.gradients.place import Place, forwards, marks
from evenclip.gradients.places import Places, modes

__all__ = ["ModelState", "states_of"]

_APART = "_parameters", "_buffers", "_modules"


class ModelState:
    """The state of a model or a loss at one time, to compare with later and to return to.

    Args:
        model: the model, or a loss of any kind.
        what: what it is called in messages.
        trained: whether trainable parameters are compared too, which updates change.
        frozen: whether frozen parameters are. No parameters of a sharded model are, because torch
            replaces them in every pass.
        without: tensors that are not compared, by identity.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> state = ModelState(model)
    >>> model.batches = 3
    >>> state.check()
    >>> hasattr(model, "batches")
    False
    """

    def __init__(
        self,
        model: Any,
        what: str = "the model",
        *,
        trained: bool = True,
        frozen: bool = True,
        without: Collection[int] = (),
    ) -> None:
        self._model, self._what, self._without = model, what, frozenset(without)
        self._modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self._whole = not any(hasattr(p, "full_tensor") for p in self._own(nn.Module.parameters))
        self._trained, self._frozen = trained and self._whole, frozen and self._whole
        self._named = dict(self._tensors())
        self._has_warned = False
        self._read()

    def _read(self) -> None:
        """Read what all places hold."""
        own = [*self._own(nn.Module.parameters), *self._own(nn.Module.buffers)]
        own += [vars(m)[name] for m in self._modules.values() for name in _APART]
        self._places = Places(self._roots(), {*self._without, *map(id, own)})
        self._objects, self._code = self._places.objects, self._places.code
        modules = list(self._modules.values())
        self._code.places.append(modes(modules))
        self._objects.places.append(forwards(modules))
        if self._whole:
            tensors = [*self._own(nn.Module.parameters), *self._own(nn.Module.buffers)]
            trained = [t for t in tensors if t.requires_grad]
            others = [t for t in tensors if not t.requires_grad]
            self._objects.places += [
                marks(trained, gradients=False), marks(others, gradients=True)
            ]  # fmt: skip
        pairs = ((repr(name), tensor) for name, tensor in self._named.items())
        self._objects.tensors[:0] = pairs
        self._versions = self._objects.versions, self._code.versions
        self._sums = self._all_sums()

    def _own(self, of: Callable[[nn.Module], Iterator[Tensor]]) -> list[Tensor]:
        """Return parameters or buffers; none of a loss that is no module."""
        return list(of(self._model)) if self._modules else []

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """Yield what holds values, with its name; the last one is followed first."""
        if not self._modules:
            yield self._what, self._model
        yield from ((self._what, module) for module in self._modules.values())
        for path, module in self._modules.items():
            where = f"{path or self._what} ({type(module).__name__})"
            for name, value in vars(module).items():
                yield f"the attribute {name!r} of {where}", value
        if self._modules and self._whole:
            for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
                yield f"an attribute of {name!r}", vars(tensor)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to compare, by name."""
        if self._modules:
            for name, p in self._model.named_parameters():
                if self._trained if p.requires_grad else self._frozen:
                    yield name, p
            yield from self._model.named_buffers()

    def _all_sums(self) -> list[int | None]:
        return sums(t for _, t in (*self._objects.tensors, *self._code.tensors))

    def check(self) -> None:
        """Put everything back; raise for what cannot be, and for tensors that have changed.

        Raises:
            ModelError: a tensor has changed, or something cannot be put back.
        """
        self.put_back()
        names = [*self._objects.names, *self._code.names]
        self._compare(names, self._all_sums(), self._sums)

    def put_back(self) -> None:
        """Do the same without reading the numbers in tensors, which is quick.

        Raises:
            ModelError: a tensor has been changed in place, or something cannot be put back.
        """
        self._put_back_objects()
        self._restore(self._code.places)
        self._compare(self._code.names, self._code.versions, self._versions[1])

    def accept(self) -> None:
        """Put back what the model holds, and accept what else has changed between two passes.

        A program may change a variable that its model or its loss reads, by a schedule for example.
        A warning says that something was put back.

        Raises:
            ModelError: a tensor has been changed in place, or something cannot be put back.
        """
        changed = self._put_back_objects()
        if changed is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{changed[0].upper()}{changed[1:]} was changed between two steps, and is put "
                "back: nothing but the update changes the model, the loss or the rule during a "
                "run. Read what follows a schedule from a variable of a module or of a closure.",
                stacklevel=2,
            )
        is_same = all(place.is_same for place in self._code.places)
        if not is_same or self._code.versions != self._versions[1]:
            self._read()

    @property
    def is_same(self) -> bool:
        """Whether the objects hold what they held, apart from numbers in tensors."""
        return all(place.is_same for place in self._objects.places)

    def _put_back_objects(self) -> str | None:
        """Put back what the model holds; return the name of something that had changed."""
        now, modules = dict(self._tensors()), self._modules
        for name in {**self._named, **now}:
            if now.get(name) is not self._named.get(name):
                raise _changed(self._what, repr(name))
        if modules and [*self._model.modules()] != [*modules.values()]:
            raise _changed(self._what, "its modules")
        changed = self._restore(self._objects.places)
        self._compare(self._objects.names, self._objects.versions, self._versions[0])
        return changed

    def _restore(self, places: Sequence[Place]) -> str | None:
        """Put places back; return the name of the first that had changed."""
        changed = [place for place in places if not place.is_same]
        for place in changed:
            if not place.put_back():
                raise _changed(self._what, place.name)
        return changed[0].name if changed else None

    def _compare(self, names: Sequence[str], now: Sequence[Any], before: Sequence[Any]) -> None:
        for name, a, b in zip(names, now, before, strict=True):
            if a != b:
                raise _changed(self._what, name)


def states_of(model: nn.Module, loss: Any) -> list[ModelState]:
    """Return the states of a model and of the loss that the user gave."""
    own = {*map(id, model.parameters())}
    return [ModelState(model), ModelState(user_loss(loss), "the loss", without=own)]


def _changed(passed: str, what: str) -> ModelError:
    """Return the error for state that a pass has changed."""
    return ModelError(
        f"A pass through {passed} changes {what}. What a batch leaves there would be published "
        "without noise, and would reach later steps. Build the layer without running statistics, "
        "or compute the value from one sample alone."
    )
