# SPDX-License-Identifier: Apache-2.0
"""Which views an engine keeps, and which targets it refuses, told from settings alone."""

import pytest

from vllm_spec_ext.engine.views import view_checks
from vllm_spec_ext.engine.views.view_checks import wanted_views
from vllm_spec_ext.proposers.cache_view import CacheView
from vllm_spec_ext.proposers.cache_view.options import CacheViewOptions


@pytest.mark.parametrize(
    ("is_cpu", "draft_on_cpu", "number"),
    [(True, False, 0), (True, True, 1), (False, False, 1), (False, True, 1)],
)
def test_a_method_that_is_off_has_no_views(
    is_cpu: bool, draft_on_cpu: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it takes no KV blocks and no memory, and refuses no target."""
    monkeypatch.setattr(view_checks.current_platform, "is_cpu", lambda: is_cpu)
    options = CacheViewOptions(draft_on_cpu=draft_on_cpu)
    assert len(wanted_views(CacheView.views(options), CacheView.info, options)) == number
