# SPDX-License-Identifier: Apache-2.0
"""The adapter to vLLM's V2 model runner; the one to its V1 runner is :mod:`..runner`.

What drafts, verifies and lays out trees knows neither: it sees :class:`..spec_runner.SpecRunner`.
"""
