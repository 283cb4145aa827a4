# SPDX-License-Identifier: Apache-2.0
"""Online distillation: drafters that learn from what they serve (Liu et al. 2024).

A loop over a folder. The engine records what the target said (:mod:`.tap`, :mod:`.sample_files`);
a process of its own trains a twin of the drafter on it (:mod:`.trainer`) and publishes versions
(:mod:`.versions`); the engine tries each on a share of its steps and keeps or refuses it
(:mod:`.trial`, :mod:`.session`). Imports no vLLM.
"""
