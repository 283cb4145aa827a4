# SPDX-License-Identifier: Apache-2.0
"""Draft trees grown level by level with draft models; shared by the methods that run them.

The parts: what a tree is to look like (:mod:`.shapes`), drawing from a model's distribution
(:mod:`.drawing`), one forward pass a level for all requests (:mod:`.levels`), trees of several
models in one draft (:mod:`.merging`), what became of them (:mod:`.learning`), and a proposer made
of these (:mod:`.tree_drafting`).

A tree is *chosen* (each node's best candidates, verified by the target's own draws) or *drawn*
(children drawn independently from the model's distribution, verified by multi-step speculative
sampling). A drawn tree's shape follows from what was learned in earlier steps, and is settled
before a token of it is drawn; see :mod:`vllm_spec_ext.scorers.walk.multi_step`.
"""
