# SPDX-License-Identifier: Apache-2.0
"""Per-request options: from ``SamplingParams.extra_args`` / ``vllm_xargs`` to a checked object.

Offline a client writes ``extra_args={"spec_ext": {"source_span": [3, 40]}}``. HTTP's
``vllm_xargs`` takes no nested objects, so there each option is a key of its own,
``{"spec_ext.source_span": [3, 40]}``, or ``"spec_ext"`` holds JSON text. Both forms work in both
places. :mod:`vllm_spec_ext.engine.requests.door` calls this for every request.

It also tells the worker what vLLM keeps from it: a request's share group, as the salt stays in the
scheduler, and that its input is streamed. Both travel among the extra arguments, too, and what a
client put there is dropped.
"""

import difflib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_spec_ext.errors import RequestOptionError, SpecExtError, shown
from vllm_spec_ext.options import RequestOptions, parse_json, parse_options
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import UNSALTED, RequestFacts, RequestLimits
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.options import EtaOptions

if TYPE_CHECKING:
    from vllm_spec_ext.engine.starting.spec_config import MethodSettings

logger = logging.getLogger("vllm.spec_ext")

KEY = "spec_ext"

GROUP_KEY = "spec_ext_share_group"
"""Set by the front end for every request; no option, and never a client's to say."""

SESSION_KEY = "spec_ext_session"
"""Likewise, of requests whose input comes in pieces."""

# Eta sampling is a sampling parameter, so it stands beside the others: name -> EtaOptions field.
ETA_KEYS = {"eta_cutoff": "epsilon", "eta_alpha": "alpha"}

_PREFIX = KEY + "."

# Options whose bare names nobody else would use.
_DISTINCT = {"source_span", "source_text", "source_markers", "source_token_ids", "max_draft_tokens"}

# JSON text of a request may be this long for each token of max_model_len, and in all: twice the
# longest source text that input_copy takes, as JSON escapes some characters.
_JSON_CHARACTERS_PER_TOKEN = 64
_JSON_CHARACTERS = 4096

_SOON_READ = 4096  # characters and elements that take no time worth a thread


class ResolvedOptions(dict[str, Any]):
    """Options that were checked and resolved, as they travel to the engine; never changed.

    vLLM copies sampling parameters deeply, several times a request; these are not copied.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "ResolvedOptions":
        return self


def collect(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our options among a request's extra arguments, in flat form.

    Raises:
        RequestOptionError: ``spec_ext`` is neither an object nor JSON text of one.
    """
    found: dict[str, Any] = {}
    for name, value in (extra_args or {}).items():
        if name == KEY:
            found.update(_as_object(value))
        elif _is_prefixed(name):
            bare = name.removeprefix(_PREFIX)
            if bare in ETA_KEYS:
                raise RequestOptionError(name, f"found a prefix, expected {bare} alone")
            found[bare] = value
    return found


def _meant(name: object) -> str | None:
    """How a key that is probably one of ours, and would be passed over, is written."""
    if not isinstance(name, str) or name in (KEY, GROUP_KEY, SESSION_KEY) or _is_prefixed(name):
        return None
    if name in _DISTINCT:
        return _PREFIX + name
    if name.startswith("eta_") and name not in ETA_KEYS:
        return next(iter(difflib.get_close_matches(name[:20], ETA_KEYS, n=1, cutoff=0.7)), None)
    head = name.partition(".")[0].lower().replace("-", "_")
    is_near = head.replace("_", "") == "specext" or head.startswith(f"{KEY}_")
    return f"{KEY}, or {_PREFIX}NAME" if is_near else None


def _refuse_misspelt(extra_args: Mapping[str, Any] | None) -> None:
    for name in extra_args or ():
        meant = _meant(name)
        if meant is not None:
            raise RequestOptionError(
                name, f"found {shown(name)}, which would be passed over; expected {meant}"
            )


def _as_object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise RequestOptionError(KEY, str(error)) from error
    if not isinstance(value, Mapping):
        raise RequestOptionError(
            KEY,
            f"found {type(value).__name__}, expected an object of options; over HTTP, which takes "
            f"none, JSON text of it or keys like {_PREFIX}enabled",
        )
    for name in value:
        if not isinstance(name, str):
            raise RequestOptionError(KEY, f"found {shown(name)}, expected names of options")
    return value


def _is_prefixed(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_PREFIX)


def parse_request(
    schema: type[RequestOptions], extra_args: Mapping[str, Any] | None, method: str
) -> RequestOptions:
    """Validate a request's options.

    Raises:
        RequestOptionError: Naming the first wrong field.
    """
    given = collect(extra_args)
    try:
        return parse_options(schema, given, f"a request to {method}")
    except SpecExtError as error:
        wrong = _first_wrong_field(schema, given)
        raise RequestOptionError(_PREFIX + wrong if wrong else KEY, str(error)) from error


def _first_wrong_field(schema: type[RequestOptions], given: Mapping[str, Any]) -> str:
    for name, value in given.items():
        if name not in schema.model_fields:
            return name
        try:
            parse_options(schema, {name: value}, "")
        except SpecExtError:
            return name
    return ""


def parse_eta(extra_args: Mapping[str, Any] | None) -> EtaOptions | None:
    """A request's eta sampling, None if it asks for none.

    Raises:
        RequestOptionError: A value out of range, or ``eta_alpha`` alone.
    """
    given = {key: extra_args[key] for key in ETA_KEYS if extra_args and key in extra_args}
    if not given:
        return None
    if "eta_cutoff" not in given:
        raise RequestOptionError("eta_alpha", "given without eta_cutoff; add eta_cutoff")
    for key, field in ETA_KEYS.items():
        if key in given:
            try:
                parse_options(EtaOptions, {"epsilon": 0.0, field: given[key]}, "eta sampling")
            except SpecExtError as error:
                raise RequestOptionError(key, str(error)) from error
    options = EtaOptions(epsilon=given["eta_cutoff"], alpha=given.get("eta_alpha"))
    return options if options.epsilon else None


def has_options(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request carries options of ours, or what is meant to be some; most do not."""
    return any(
        name == KEY or name in ETA_KEYS or _is_prefixed(name) or _meant(name)
        for name in extra_args or ()
    )


def check_options(
    settings: "MethodSettings", extra_args: Mapping[str, Any] | None, facts: RequestFacts
) -> RequestOptions:
    """A request's options, checked against the method, the server's rule and the prompt.

    Raises:
        RequestOptionError: Naming the field.
    """
    options = _checked(settings, extra_args, facts)
    with _as_written():
        return registry.load(settings.method).resolve_request(options, facts)


@contextmanager
def _as_written() -> Iterator[None]:
    """A proposer knows its fields by their bare names; the client wrote the prefix."""
    try:
        yield
    except RequestOptionError as error:
        message = str(error).removeprefix(f"{error.parameter}: ")
        raise RequestOptionError(_PREFIX + error.parameter, message) from error


def _checked(
    settings: "MethodSettings", extra_args: Mapping[str, Any] | None, limits: RequestLimits
) -> RequestOptions:
    """Checked against the method, the server's rule and the model."""
    schema = registry.info(settings.method).request_options
    options = parse_request(schema, extra_args, settings.method)
    narrow(settings.rule, options.scorer, _PREFIX + "scorer")
    check = getattr(registry.load(settings.method), "check_request", None)
    if check is not None:  # not all are BaseProposers
        with _as_written():
            check(options, limits)
    return options


def resolve(
    settings: "MethodSettings", extra_args: Mapping[str, Any] | None, facts: RequestFacts
) -> dict[str, Any]:
    """Extra arguments as the engine gets them: checked, and resolved against the prompt.

    Raises:
        RequestOptionError: Naming the field; for a failure that nobody thought of, too.
    """
    with _told(extra_args):
        _refuse_misspelt(extra_args)
        _check_lengths(extra_args, facts)
        eta = parse_eta(extra_args)
        options = check_options(settings, extra_args, facts)
        resolved = ResolvedOptions(options.model_dump(mode="json", exclude_defaults=True))
    others = {
        name: value
        for name, value in (extra_args or {}).items()
        if name != KEY and name not in ETA_KEYS and not _is_prefixed(name)
    }
    if eta is not None:  # as numbers that travel; a client's integer may have any size
        values = {key: getattr(eta, field) for key, field in ETA_KEYS.items()}
        others.update({key: value for key, value in values.items() if value is not None})
    return {**others, KEY: resolved}


def check_form(
    settings: "MethodSettings", extra_args: Mapping[str, Any] | None, limits: RequestLimits
) -> None:
    """Refuse what is wrong whatever the prompt is, where that is soon told.

    Long options are left to :func:`resolve`, which may run beside the event loop.

    Raises:
        RequestOptionError: As there.
    """
    with _told(extra_args):
        _refuse_misspelt(extra_args)
        if _size(extra_args or {}) > _SOON_READ:
            return
        values = collect(extra_args)
        if _size(values) > _SOON_READ:
            return
        parse_eta(extra_args)
        _checked(settings, {KEY: values}, limits)


@contextmanager
def _told(extra_args: Mapping[str, Any] | None) -> Iterator[None]:
    """Of a failure that nobody thought of the client hears, too."""
    try:
        yield
    except RequestOptionError:
        raise
    except Exception as error:
        logger.exception("vllm-spec-ext: a request's options could not be read")
        names = [name for name in extra_args or () if _is_prefixed(name)]
        raise RequestOptionError(
            names[0] if len(names) == 1 else KEY,
            f"could not be read ({type(error).__name__}); found the options "
            f"{shown(names or [KEY])}",
        ) from error


def _size(values: Mapping[str, Any]) -> int:
    """Characters and elements."""
    return sum(len(value) for value in values.values() if isinstance(value, Sized))


def share_group(cache_salt: str | None, share_unsalted: bool) -> str | None:
    """The group of requests that may see what this one said; None if there is no other.

    Args:
        cache_salt: The request's own; hashed, as it is a secret and extra arguments are logged.
        share_unsalted: Whether requests without one are a group.
    """
    if cache_salt:
        return hashlib.sha256(f"{GROUP_KEY}:{cache_salt}".encode()).hexdigest()[:32]
    return UNSALTED if share_unsalted else None


def with_facts(
    extra_args: Mapping[str, Any] | None, group: str | None, *, is_session: bool = False
) -> dict[str, Any] | None:
    """Extra arguments with the share group in place of whatever the client said it was.

    Args:
        extra_args: As a client gave them.
        group: As of :func:`share_group`.
        is_session: The request's input comes in pieces.
    """
    ours = (GROUP_KEY, SESSION_KEY)
    others = {name: value for name, value in (extra_args or {}).items() if name not in ours}
    if group is not None:
        others[GROUP_KEY] = group
    if is_session:
        others[SESSION_KEY] = True
    return others or None


def is_session(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the front end said that the request's input comes in pieces."""
    return (extra_args or {}).get(SESSION_KEY) is True


def parse_share_group(extra_args: Mapping[str, Any] | None) -> str | None:
    """The group that the front end set. Without one, or with none of ours, nothing is shared."""
    group = (extra_args or {}).get(GROUP_KEY)
    return group if isinstance(group, str) else None


def _check_lengths(extra_args: Mapping[str, Any] | None, facts: RequestFacts) -> None:
    """Refuse JSON text that takes long to read, before it is read."""
    limit = _JSON_CHARACTERS_PER_TOKEN * facts.max_model_len + _JSON_CHARACTERS
    for name in (KEY, _PREFIX + "scorer"):
        value = (extra_args or {}).get(name)
        if isinstance(value, str) and len(value) > limit:
            raise RequestOptionError(
                name,
                f"found {len(value)} characters, expected at most {limit} with "
                f"max_model_len={facts.max_model_len}",
            )
