"""What ``test_wire_on_lab`` and its worker measure."""

STEPS = 3
TIMED = ("dense", "bf16", "int4")
SPECS = (
    *TIMED,
    "topk(density=0.05)",
    "adtopk(density=0.05)",
    "bank(density=0.05)",
    "bank(density=0.05, mode='shared')",
    "mipd(density=0.05)",
    "dgc(density=0.05)",
    "gaussiank(density=0.05)",
    "redsync(density=0.05)",
    "sidco(density=0.05)",
    "mstopk(density=0.05)",
    "adacomp",
    "dct(density=0.05)",
    "acp(rank=16)",
    "powersgd(rank=16)",
    "gtopk(density=0.05)",
    "oktopk(density=0.05)",
    "rowsparse",
)
