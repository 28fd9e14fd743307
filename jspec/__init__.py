"""Tree-based speculative decoding as pure functions in JAX.

From text to text: ``load``, ``generate_text``. The steps of a round: ``propose``, ``verify``, ``judge``, ``commit``,
``absorb``, ``observe``; over whole generations: ``generate``, ``stream``, ``decode_all``. Methods are values:
``ar()``, ``prompt_lookup(...)``, ``token_recycling(...)``; with a draft head (``load_head``) ``jetspec(...)``,
``dflash(...)``, ``ddtree(...)``, whose trees are ``best_first_tree``, ``chain_tree`` and ``exact_tree`` over its
``draft_table``, and ``domino(...)``, ``dartree(...)`` where the head has a ``Correction``, or ``eagle3(...)``; or a
``Method`` of your own. ``smart(method)`` cuts a method's trees to what pays by a cost model, ``make_cost(...)`` or the
``Profile`` of ``ready_profile(...)``; ``graft(method)`` fills them with retrieved tokens where the drafter is unsure.
``sequoia`` and ``traversal`` are rejection rules for sampled trees.
"""

__version__ = "0.1.0"

from jspec.acceptance import accept
from jspec.benches import Prompt, load_bench, read_prompts, user_turn
from jspec.checkpoint import Head, export_head, load_head, save_head
from jspec.comparison import Comparison
from jspec.cost.profile import Profile, ProfileError, setting_of
from jspec.cost.store import ready_profile
from jspec.cost.table import Cost, make_cost
from jspec.decode import (
    absorb,
    advance,
    commit,
    decode_round,
    generate,
    judge,
    observe,
    propose,
)
from jspec.device import join_processes, keep_compilations, pick_accelerator
from jspec.driver import Event, Finished, Stream, decode_all, outcome, stream
from jspec.exactness import Difference, first_difference
from jspec.growth import Frontier, grow
from jspec.heads.config import Correction, HeadConfig, HeadError, config_for, spread_taps
from jspec.heads.eagle_config import EagleConfig, eagle_config_for
from jspec.heads.parallel import DraftTable, draft_table, init_head
from jspec.mesh import make_mesh, shard_params
from jspec.method import Memory, Method, MethodState, Needs, Params, Proposal, Verdict
from jspec.methods import (
    ar,
    dartree,
    ddtree,
    dflash,
    domino,
    eagle3,
    graft,
    jetspec,
    prompt_lookup,
    seed_table,
    smart,
    token_recycling,
)
from jspec.models.fetch import FetchError
from jspec.models.load import Target
from jspec.models.load import load_target as load
from jspec.picture import draw_svg, draw_text
from jspec.prefill import admit
from jspec.recording import Recording, record, replay
from jspec.rejection import Rejection, draw_siblings, sequoia, tokens_of, traversal
from jspec.report import summarize
from jspec.sampling import Sampling
from jspec.state import (
    DecodeState,
    KVCache,
    Plan,
    Rows,
    capacity_for,
    each_shard,
    new_state,
)
from jspec.stopping import stop_table
from jspec.tables import best_first_tree, chain_tree, exact_tree
from jspec.text import (
    Answer,
    default_method,
    encode_prompt,
    generate_text,
    shown_text,
    target_stops,
)
from jspec.thresholds.store import ready_graft
from jspec.tree import (
    HEAD,
    RETRIEVED,
    SOURCES,
    Tree,
    ancestors,
    assemble,
    check,
    compact,
    from_paths,
    merge,
    pack_bits,
    positions,
    root_only,
    select,
    unpack_bits,
    visibility,
)
from jspec.verification import Verified, row_bucket, verify

__all__ = [
    "HEAD",
    "RETRIEVED",
    "SOURCES",
    "Answer",
    "Comparison",
    "Correction",
    "Cost",
    "DecodeState",
    "Difference",
    "DraftTable",
    "EagleConfig",
    "Event",
    "FetchError",
    "Finished",
    "Frontier",
    "Head",
    "HeadConfig",
    "HeadError",
    "KVCache",
    "Memory",
    "Method",
    "MethodState",
    "Needs",
    "Params",
    "Plan",
    "Profile",
    "ProfileError",
    "Prompt",
    "Proposal",
    "Recording",
    "Rejection",
    "Rows",
    "Sampling",
    "Stream",
    "Target",
    "Tree",
    "Verdict",
    "Verified",
    "absorb",
    "accept",
    "admit",
    "advance",
    "ancestors",
    "ar",
    "assemble",
    "best_first_tree",
    "capacity_for",
    "chain_tree",
    "check",
    "commit",
    "compact",
    "config_for",
    "dartree",
    "ddtree",
    "decode_all",
    "decode_round",
    "default_method",
    "dflash",
    "domino",
    "draft_table",
    "draw_siblings",
    "draw_svg",
    "draw_text",
    "each_shard",
    "eagle3",
    "eagle_config_for",
    "encode_prompt",
    "exact_tree",
    "export_head",
    "first_difference",
    "from_paths",
    "generate",
    "generate_text",
    "graft",
    "grow",
    "init_head",
    "jetspec",
    "join_processes",
    "judge",
    "keep_compilations",
    "load",
    "load_bench",
    "load_head",
    "make_cost",
    "make_mesh",
    "merge",
    "new_state",
    "observe",
    "outcome",
    "pack_bits",
    "pick_accelerator",
    "positions",
    "prompt_lookup",
    "propose",
    "read_prompts",
    "ready_graft",
    "ready_profile",
    "record",
    "replay",
    "root_only",
    "row_bucket",
    "save_head",
    "seed_table",
    "select",
    "sequoia",
    "setting_of",
    "shard_params",
    "shown_text",
    "smart",
    "spread_taps",
    "stop_table",
    "stream",
    "summarize",
    "target_stops",
    "token_recycling",
    "tokens_of",
    "traversal",
    "unpack_bits",
    "user_turn",
    "verify",
    "visibility",
]
