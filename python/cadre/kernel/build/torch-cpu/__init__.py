"""Cadre's attention as a kernel that transformers loads by its name; the package `cadre` has to be installed beside."""

from cadre import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
