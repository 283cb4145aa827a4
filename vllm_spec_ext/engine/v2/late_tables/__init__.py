# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling without waiting for a step's tokens: late tables, current query.

The proposer's tables are one step old; the device looks the end of the text up that is there
(:mod:`vllm_spec_ext.proposers.late_drafting`). A step goes through these modules:

    speculator.py    vLLM asks for drafts while it queues the step, before its tokens exist
    late_steps.py    the step before is read now; then the look-up is queued
    told_output.py   the step's answer, which vLLM and we wait for, whoever comes first
    design.py        which engines can do it, and why others draft behind each step's tokens
"""
