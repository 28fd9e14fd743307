"""The methods, one file a paper. Factories: equal arguments give the same Method, so nothing is compiled twice."""

from jspec.methods.ar import ar
from jspec.methods.dartree import dartree
from jspec.methods.ddtree import ddtree
from jspec.methods.dflash import dflash
from jspec.methods.domino import domino
from jspec.methods.eagle3 import eagle3
from jspec.methods.graft import graft
from jspec.methods.jetspec import jetspec
from jspec.methods.prompt_lookup import prompt_lookup
from jspec.methods.smart import smart
from jspec.methods.token_recycling import seed_table, token_recycling

__all__ = [
    "ar",
    "dartree",
    "ddtree",
    "dflash",
    "domino",
    "eagle3",
    "graft",
    "jetspec",
    "prompt_lookup",
    "seed_table",
    "smart",
    "token_recycling",
]
