"""Grammars: output that must match a JSON schema, a regular expression, an EBNF or a structural tag.

Mirrors SGLang's constrained/. Imports: batch, model.tokenizer, config, errors, events; no torch.
"""

from sgviz.grammar.backend import CompiledGrammar, GrammarBackend, Key
from sgviz.grammar.compiler import GrammarCompiler, Ticket
from sgviz.grammar.factory import make_compiler

__all__ = ["CompiledGrammar", "GrammarBackend", "GrammarCompiler", "Key", "Ticket", "make_compiler"]
