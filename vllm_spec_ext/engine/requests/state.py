# SPDX-License-Identifier: Apache-2.0
"""What the engine keeps of a request's own options while it runs."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vllm_spec_ext.engine.requests.options import (
    check_options,
    has_options,
    parse_eta,
    parse_share_group,
)
from vllm_spec_ext.engine.starting.spec_config import MethodSettings
from vllm_spec_ext.options import RequestOptions
from vllm_spec_ext.proposers import registry
from vllm_spec_ext.proposers.base import RequestFacts
from vllm_spec_ext.scorers.narrow import narrow
from vllm_spec_ext.scorers.options import EtaOptions, ScorerOptions

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger("vllm.spec_ext")


@dataclass(frozen=True)
class RequestState:
    """Parsed once, when the request is first drafted for or judged."""

    options: RequestOptions
    rule: ScorerOptions | None  # None: the server's own
    eta: EtaOptions | None
    exact_ids: NDArray[np.int64]  # stop and EOS ids: only an exact match accepts these
    share_group: str | None = None  # see RequestStep


def read_request(
    params: "SamplingParams", settings: MethodSettings, facts: RequestFacts
) -> RequestState:
    """Parse a request's ``SamplingParams``.

    The front end has refused bad options already; what went around it runs with defaults. Nothing
    a request says may raise here: that would end the engine, and all other requests with it.
    """
    options, rule, eta = registry.info(settings.method).request_options(), None, None
    if has_options(params.extra_args):
        try:
            options, rule, eta = _read_options(params, settings, facts)
        except Exception as error:
            logger.warning("vllm-spec-ext: %s; the request runs with defaults", error)
    exact = set(params.all_stop_token_ids)
    if params.eos_token_id is not None:
        exact.add(params.eos_token_id)
    exact_ids = np.array(sorted(exact), np.int64)
    return RequestState(options, rule, eta, exact_ids, parse_share_group(params.extra_args))


def _read_options(
    params: "SamplingParams", settings: MethodSettings, facts: RequestFacts
) -> tuple[RequestOptions, ScorerOptions | None, EtaOptions | None]:
    options = check_options(settings, params.extra_args, facts)
    rule = None if options.scorer is None else narrow(settings.rule, options.scorer)
    return options, rule, parse_eta(params.extra_args)
