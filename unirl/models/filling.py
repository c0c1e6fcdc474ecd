"""Fill a network whose parameters were made without values, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn

from unirl.core.errors import ModelError


def fill_from_files(
    parameters: Mapping[str, nn.Parameter],
    files: Mapping[str, Sequence[Path]],
    write: Callable[[nn.Parameter, Tensor], None],
) -> None:
    """Give each parameter the tensor of its name; `write(parameter, whole tensor on the CPU)`.

    files: by the prefix that the parameters' names have before those in the files.

    A layer that an adapter wraps is found under the name it has without one. Raises ModelError
    when a parameter is in no file, in a wrong shape, or there are no files.
    """
    wanted = {name.replace(".base_layer.", "."): p for name, p in parameters.items()}
    located = [(prefix, path) for prefix, paths in files.items() for path in paths]
    for prefix, path in located:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if prefix + name not in wanted:
                    continue
                tensor = file.get_tensor(name)
                parameter = wanted.pop(prefix + name)
                if tensor.shape != parameter.shape:
                    raise ModelError(
                        f"{path}: {name} is {tuple(tensor.shape)}, the network has "
                        f"{tuple(parameter.shape)}"
                    )
                write(parameter, tensor)
    if wanted:
        names = [path.name for _, path in located]
        raise ModelError(f"the files {names} lack {len(wanted)} tensors: {sorted(wanted)[:4]}")
