# SPDX-License-Identifier: Apache-2.0
"""Training of draft models and heads. Imports no vLLM, except to generate distillation data."""
