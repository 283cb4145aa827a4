# SPDX-License-Identifier: Apache-2.0
"""Our configuration arrives in another process: as itself, or with words that help.

A pickle names the classes of its objects, so a process without them says only "No module named
'vllm_spec_ext'", in the middle of somebody's log. On a cluster that is a likely mistake: the
package is in one image and not in the other. So what stands in front of the object is an
expression that the standard library can evaluate, and that looks for the packages first.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

_WORDS = (
    "a speculative configuration of vllm-spec-ext arrived where packages are missing: found no {}; "
    "expected what is installed where the configuration was built; fix: install it wherever vLLM "
    "runs: in the image, or by pip or uv in Ray's runtime_env (py_modules carries no plugins)"
)
# pickle calls `eval` with it: a function of the missing packages, then the list of these.
_EXPRESSION = """
(
    lambda missing: (_ for _ in ()).throw(ModuleNotFoundError({words!r}.format(", ".join(missing))))
    if missing
    else __import__({here!r}, fromlist=["empty_config"]).empty_config
)([name for name in {packages!r} if not __import__("importlib.util").util.find_spec(name)])
""".strip()


class Arrival:
    """Makes an empty configuration; in a pickle it is an expression that needs no package."""

    def __init__(self, options_module: str) -> None:
        """Note what must be there.

        Args:
            options_module: Where the class of the method's options is; methods of other packages
                have theirs elsewhere.
        """
        names = {module.partition(".")[0] for module in (__name__, options_module)}
        self._packages = sorted(names - {"__main__"})

    def __call__(self) -> "SpecExtConfig":
        """An object that waits for its state."""
        return empty_config()

    def __reduce__(self) -> tuple[Any, ...]:
        """What pickle writes."""
        return eval, (_EXPRESSION.format(words=_WORDS, here=__name__, packages=self._packages),)


def empty_config() -> "SpecExtConfig":
    """An object that waits for its state."""
    from vllm_spec_ext.engine.starting.spec_config import SpecExtConfig

    return object.__new__(SpecExtConfig)
