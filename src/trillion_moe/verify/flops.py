"""Floating-point operations that a Pallas kernel executes, counted from its own products and its own control flow.

XLA repeats the estimate that a kernel declares, which is no evidence. Here a kernel's jaxpr is followed step by step of
its grid: scalars are computed as they would be on the chip, arrays are not, and every matrix product that is reached
counts. A branch or trip count that depends on an array cannot be followed and is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval as pe


@dataclass
class Count:
    """executed: by the products that ran; declared: by the kernels' CostEstimates."""

    executed: int = 0
    declared: int = 0
    kernels: int = 0


def count(f: Callable, *args: Any) -> Count:
    """Of every product in ``f(*args)``, inside Pallas kernels and out.

    args: arrays where control flow needs their values (group sizes), else ``jax.ShapeDtypeStruct``.
    """
    closed = jax.make_jaxpr(f)(*args)
    closed = closed.replace(jaxpr=pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), True)[0])
    known = [None if isinstance(a, jax.ShapeDtypeStruct) else np.asarray(a) for a in jax.tree.leaves(args)]
    counter = _Counter(Count())
    counter.run(closed.jaxpr, closed.consts, known)
    return counter.total


class _Counter:
    """Follows jaxprs. A value is an array or number, or None where only its shape is known."""

    def __init__(self, total: Count, step: tuple[int, ...] = (), size: tuple[int, ...] = ()):
        self.total, self.step, self.size = total, step, size

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
            zip(jaxpr.invars, args, strict=True)
        )

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else env.get(atom)

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, args: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        unknown = [None] * len(eqn.outvars)
        if name == "pallas_call":
            self.kernel(params, args)
            return unknown
        if name == "program_id":
            return [np.int32(self.step[params["axis"]])]
        if name == "num_programs":
            return [np.int32(self.size[params["axis"]])]
        if name == "get":
            return [_read(args, params["tree"])]
        if name == "dot_general":
            self.total.executed += _product(eqn)
            return unknown
        if name in ("scan", "while") and all(a is not None for a in args):  # of no kernel's: those read refs
            return _computed(eqn, args)
        if name == "cond":
            return self.branch(params["branches"], args[0], args[1:], eqn)
        if name == "while":
            return self.loop(params, args, eqn)
        if name == "scan":
            return self.repeat(params, args, eqn)
        if inner := params.get("jaxpr") or params.get("call_jaxpr") or params.get("fun_jaxpr"):
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)
        if any(a is None for a in args):
            return unknown
        return self.scalar(eqn, args) if self.step else _computed(eqn, args)

    def scalar(self, eqn: Any, args: list[Any]) -> list[Any]:
        """What a step computes of numbers, in numpy: thousands of steps are followed. Arrays are left unknown."""
        name, (out,) = eqn.primitive.name, eqn.outvars
        if out.aval.shape or name not in _SCALAR:
            return [None]
        if name == "convert_element_type":
            return [np.asarray(args[0], eqn.params["new_dtype"])]
        return [_SCALAR[name](*args)]

    def branch(self, branches: Any, index: Any, args: list[Any], eqn: Any) -> list[Any]:
        if index is None:
            raise ValueError(f"a branch depends on an array: {eqn}")
        taken = branches[int(index)]
        return self.run(taken.jaxpr, taken.consts, args)

    def loop(self, params: Any, args: list[Any], eqn: Any) -> list[Any]:
        conds, bodies = params["cond_nconsts"], params["body_nconsts"]
        test, body, carry = args[:conds], args[conds : conds + bodies], args[conds + bodies :]
        while True:
            (again,) = self.run(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, [*test, *carry])
            if again is None:
                raise ValueError(f"a trip count depends on an array: {eqn}")
            if not again:
                return carry
            carry = self.run(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, [*body, *carry])

    def repeat(self, params: Any, args: list[Any], eqn: Any) -> list[Any]:
        """Once for all steps: their scalars are taken as unknown."""
        before, jaxpr = self.total.executed, params["jaxpr"]
        consts = args[: _constants(params, args)]
        rest = [None] * (len(jaxpr.jaxpr.invars) - len(consts))
        self.run(jaxpr.jaxpr, jaxpr.consts, [*consts, *rest])
        self.total.executed = before + (self.total.executed - before) * params["length"]
        return [None] * len(eqn.outvars)

    def kernel(self, params: Any, args: list[Any]) -> None:
        """All steps of the last axis of the grid; those of the others do the same work, each over other columns."""
        mapping, estimate = params["grid_mapping"], params["cost_estimate"]
        dynamic = iter(args[: mapping.num_dynamic_grid_bounds])
        grid = [int(next(dynamic)) if not isinstance(size, int) else size for size in mapping.grid] or [1]
        operands = args[mapping.num_dynamic_grid_bounds :]
        inside, jaxpr = Count(), params["jaxpr"]
        refs = [*operands, *[None] * (len(jaxpr.invars) - len(operands))]
        for last in range(grid[-1]):
            _Counter(inside, (*[0] * (len(grid) - 1), last), tuple(grid)).run(jaxpr, (), refs)
        self.total.executed += inside.executed * math.prod(grid[:-1])
        self.total.declared += 0 if estimate is None else estimate.flops
        self.total.kernels += 1


_SCALAR: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.bitwise_not, "convert_element_type": np.asarray,
    "div": lambda a, b: np.int32(int(a / b)), "clamp": lambda low, a, high: np.clip(a, low, high),
    "select_n": lambda which, *cases: cases[int(which)],
}  # fmt: skip


def _constants(params: Any, args: list[Any]) -> int:
    """How many operands of a scan are the same in every step."""
    if "num_consts" in params:  # until jax 0.11
        return params["num_consts"]
    return len(list(params["ft_in"].update(args).unpack()[0]))


def _computed(eqn: Any, args: list[Any]) -> list[Any]:
    found = eqn.primitive.bind(*args, **eqn.params)
    return [np.asarray(a) for a in (found if eqn.primitive.multiple_results else [found])]


def _read(args: list[Any], tree: Any) -> Any:
    """A scalar of a ref whose values are known."""
    ref, *index = args
    if ref is None or any(i is None for i in index):
        return None
    (indexer,) = jax.tree.unflatten(tree, index)
    at = tuple(int(i) for i in indexer.indices if np.size(i) == 1)
    return ref[at] if len(at) == ref.ndim else None


def _product(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return 2 * depth * math.prod(eqn.outvars[0].aval.shape)
