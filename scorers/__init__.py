# SPDX-License-Identifier: Apache-2.0
"""Scorers: which draft tokens stand, and which tokens a step emits.

``rules/`` holds the acceptance rules, one a module, and ``walk/`` what goes through a draft tree.
``options.py`` says what a rule can be set to, ``registry.py`` lists all rules, ``parse.py`` and
``narrow.py`` read what the server and its requests ask for, and ``build.py`` makes it run.
"""

if __name__ != "vllm_spec_ext.scorers":
    raise ImportError(
        f"imported as {__name__!r}; import 'vllm_spec_ext.scorers' instead, "
        "or every class in it would exist twice"
    )
