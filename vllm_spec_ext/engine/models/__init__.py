# SPDX-License-Identifier: Apache-2.0
"""Draft models inside the engine, beside the target and in its KV blocks.

:mod:`.host` has the models of one engine. :mod:`.hosted_model` is one of them as a proposer sees
it, with :mod:`.filled_blocks` and :mod:`.branches` for its books; these are pure. Only
:mod:`.paged_model`, :mod:`.loading` and :mod:`.batch_events` know vLLM's runners.
"""
