"""Plants a defect temporarily: changes the code of a function in the function object itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.defects.patch import Patch, Text
from tests.defects.source import compiled, definition_of, exchanged, function_of, source_of, unknown_names


@contextmanager
def planted(target: str, patch: Patch | Text | str, new: str | None = None) -> Iterator[None]:
    """Change ``target``, ``module:Qualname`` inside the package: a function, method, static method or property.

    ``planted(target, old, new)`` replaces a fragment of the source, as ``text(old, new)`` does. Only the code of the
    function is replaced, so that every reference uses the change and forked ranks inherit it.
    """
    function = function_of(target)
    if isinstance(patch, str):
        assert new is not None
        patch = Text(patch, new)
    if isinstance(patch, Text):
        definition = definition_of(function, patch.changed(source_of(function)[0], function.__qualname__))
    else:
        definition = patch(definition_of(function))
    code = compiled(function, definition)
    # Its NameError would count as a defect that was caught.
    unknown = unknown_names(function, code)
    assert not unknown, f"{target} has no {', '.join(sorted(unknown))}"
    with exchanged(function, code):
        yield
