# SPDX-License-Identifier: Apache-2.0
"""The target between its steps: passes over a part of its own KV cache, by block tables alone.

``page_layout.py`` says what a view shows, ``view_pass.py`` is a pass as arrays, ``target_view.py``
keeps the books on rank 0; ``layer_tables.py``, ``page_means.py`` and ``page_choice.py`` choose
pages on every rank, and ``paged_target.py`` runs the passes on vLLM.
"""
