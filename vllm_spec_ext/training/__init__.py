# SPDX-License-Identifier: Apache-2.0
"""Training of draft models and heads. Imports no vLLM, except to generate distillation data.

What lies here is shared by all methods: prompts, distillation, hidden states, batches, the loop and
the stages around it. A folder a method holds what only that method has: its settings
(``schema.py``), its task (a :class:`~.task.DraftTask`) and its trainer (``trainer.py``);
:mod:`.registry` lists them. Nothing shared imports a method's folder, and no method another's.
"""
