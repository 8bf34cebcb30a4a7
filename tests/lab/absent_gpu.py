"""A GPU that is not there: its tensors compute on the processor and refuse to meet the processor's, as those of CUDA do.

``python absent_gpu.py NOTEBOOK EXPERIMENT ...`` runs a notebook up to its experiments there, and of each one a step of its
training function. One that leaves a tensor on the wrong device ends with the error that it would end with on the first real GPU.
"""

import os
import pathlib
import sys
import tempfile

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "absent"
aten = torch.ops.aten
BETWEEN_DEVICES = (aten.copy_.default, aten._to_copy.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)  # CUDA takes both
SMALL = {"images": 200, "held": 100, "epochs": 1, "steps": 1, "rounds": 1, "batch": 4}
KINDS = ("network", "behaviour")  # one run of each value
CRASHES = ("network", "RNN")  # torch's own recurrent layer ends the process on such a device


class There(torch.Tensor):
    """A tensor on the absent GPU; ``numbers`` is the tensor of the processor that holds its numbers."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=f"{NAME}:0",
            requires_grad=numbers.requires_grad,
        )

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class AbsentGPU(TorchDispatchMode):
    """Within it, tensors can be made there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return compute(function, args, kwargs or {})


class Autocast(TorchFunctionMode):
    """In place of torch.autocast, which knows no such device: convolutions in float32."""

    def __init__(self, *_, **__):
        super().__init__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.conv2d:
            args = tree_map_only(torch.Tensor, torch.Tensor.float, args)
        return function(*args, **(kwargs or {}))


def compute(function, args, kwargs):
    """An operation with the numbers; its results lie where those of a GPU would."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, There)]
    free = function in BETWEEN_DEVICES or (function in INDEXED and isinstance(args[0], There))
    if there and not free and any(t.dim() for t in tensors if not isinstance(t, There)):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device")
    args, plain = tree_map_only(There, lambda t: t.numbers, (args, kwargs))
    goes = isinstance(tensors[0], There) if function is aten.copy_.default else bool(there)
    if plain.get("device") is not None:
        goes = torch.device(plain["device"]).type == NAME
        plain = plain | ({"device": "cpu"} if goes else {})
    found = function(*args, **plain)
    if not goes:
        return found
    known = {id(t.numbers): t for t in there}  # an operation in place returns its argument

    def wrapped(t):
        return known[id(t)] if id(t) in known else There(t)

    return tree_map_only(torch.Tensor, wrapped, found)


def prepare(folder: str) -> None:
    """Registers the device and tells the lab of it."""
    _setup_privateuseone_for_python_backend(NAME)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) passes through the mode
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch.inference_mode = torch.no_grad  # in which no subclass of a tensor can be indexed
    torch.autocast = Autocast
    os.environ |= {
        "NDL_MODE": "full",
        "NDL_RESULTS": folder,
        "NDL_DEVICE": NAME,
        "NDL_SCALE": "largest",
        "MPLBACKEND": "Agg",
    }


def refuses_the_processor() -> None:
    """The device does what it is there for: a tensor on it does not meet one of the processor."""
    with AbsentGPU():
        try:
            torch.ones(3, device=f"{NAME}:0") + torch.ones(3)
        except RuntimeError:
            return
    raise AssertionError("tensors on two devices were added")


class Done(SystemExit):
    """A step of every experiment was taken."""


def lead_there(experiments: list[str]) -> None:
    """Lets the named experiments take a step there, and all others read what is recorded."""
    from lab.records import runs
    from lab.train import loop

    whole, complete, check = loop.evaluate, runs.complete, loop.Split.__post_init__
    left = list(experiments)

    def short(part):
        return tuple(tensor[:64] for tensor in part)

    def cut(split):
        check(split)
        for name in ("val", "test"):
            object.__setattr__(split, name, short(getattr(split, name)))

    def step(path, experiment, grid):
        if experiment.name not in experiments:
            return complete(path, experiment, grid)
        kinds, results = {}, {}
        grid = [c for c in grid if CRASHES not in c.items()]
        for config in grid:
            kind = tuple(config.get(name) for name in KINDS)
            kinds.setdefault(kind, config | {k: v for k, v in SMALL.items() if k in config})
        for kind, config in kinds.items():
            run = experiment.run
            with AbsentGPU():
                results[kind] = run([config])[0] if experiment.together else run(config)
            print(experiment.name, config, results[kind]["metrics"], flush=True)
        left.remove(experiment.name)
        if not left:
            raise Done(0)
        return [{"config": c, **results[tuple(map(c.get, KINDS))]} for c in grid]

    loop.Split.__post_init__ = cut
    loop.evaluate = lambda model, part, *more, **how: whole(model, short(part), *more, **how)
    runs.complete = step
    for module in [m for name, m in sys.modules.items() if name.startswith("lab")]:
        if getattr(module, "default_device", None) is not None:
            module.default_device = lambda asked=None: torch.device(asked or f"{NAME}:0")


def main(notebook: str, *experiments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        refuses_the_processor()
        from lab.tools import scripts

        lead_there(list(experiments))
        source = scripts.source(pathlib.Path(notebook))
        script = pathlib.Path(folder, "script.py")
        script.write_text(source, encoding="utf-8")
        os.chdir(pathlib.Path(notebook).parent)
        exec(compile(source, str(script), "exec"), {"__name__": "__main__"})
    raise SystemExit("not every experiment was reached")


if __name__ == "__main__":
    main(*sys.argv[1:])
