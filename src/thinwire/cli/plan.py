"""``thinwire plan``: will compression help this model on this network, which, and by how much?"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from thinwire.cli.mistakes import between, check_outputs
from thinwire.cli.probe import cache_folder

if TYPE_CHECKING:
    from torch import nn

    from thinwire.plan import Budget, Cluster, CodecCost, Link, ModelProfile, Network, Plan, Probe
    from thinwire.plan.profiling import Loss


def plan(
    target: Annotated[
        str | None, typer.Argument(help="module:function that returns (model, batch[, loss_fn]).", metavar="[TARGET]")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="A saved model profile instead of a target.")] = None,
    link: Annotated[
        str | None, typer.Option(help="Links that are not here, such as 200mbit,1ms or 10gbit,50us.")
    ] = None,
    hosts: Annotated[
        int | None, typer.Option(help="Number of ranks. (default: as probed)", callback=between(2, 1_000_000))
    ] = None,
    probe_file: Annotated[Path | None, typer.Option("--probe", help="A saved probe. (default: the newest)")] = None,
    backend: Annotated[str, typer.Option(help="Whose collectives the closed forms follow: gloo or nccl.")] = "gloo",
    cores: Annotated[
        int | None,
        typer.Option(help="Cores of one machine. (default: as probed, or as here)", callback=between(1, 1_000_000)),
    ] = None,
    ranks_per_machine: Annotated[
        int | None, typer.Option(help="Ranks that share them. (default: as probed, or 1)", callback=between(1))
    ] = None,
    quality: Annotated[str, typer.Option(help="exact (16 bits), safe (error under the noise) or fast.")] = "safe",
    memory: Annotated[
        float | None, typer.Option(help="Megabytes allowed for residuals and other state.", callback=between(0))
    ] = None,
    compress: Annotated[list[str] | None, typer.Option(help="Also price this compressor; may be given again.")] = None,
    experimental: Annotated[bool, typer.Option("--experimental", help="Allow methods not yet shown to work.")] = False,
    save_profile: Annotated[Path | None, typer.Option(help="Keep the model profile.")] = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the predicted step as a timeline.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with roofline, timeline and sweep here.")] = None,
) -> None:
    """Predict the step time of every compressor for a model, choose one, and say why.

    The model runs a few steps on this machine; the network is the one last probed (thinwire probe) or, with --link, one
    that is not here, as in "thinwire plan train:make --link 200mbit,1ms --hosts 4". Dense is a candidate and wins ties.
    """
    console = Console()
    wanted = _Wanted(
        target=target,
        profile_file=profile,
        probe_file=probe_file,
        link=link,
        hosts=hosts,
        backend=backend,
        cores=cores,
        ranks_per_machine=ranks_per_machine,
        quality=quality,
        memory_mb=memory,
        compress=compress or [],
        experimental=experimental,
    )
    given = [one for one in (profile, probe_file) if one is not None]
    check_outputs({"--save-profile": save_profile, "--json": json_file, "--html": html}, inputs=given)
    made = _plan(wanted, save_profile, with_sweep=html is not None)
    _hand_over(console, made, draw, json_file, html)


def _hand_over(console: Console, made: Plan, draw: bool, json_file: Path | None, html: Path | None) -> None:
    console.print(made.explain(), markup=False, highlight=False, soft_wrap=True)
    if draw:
        from thinwire.plan import draw as timeline

        console.print(timeline(made.spans, max(40, console.width - 10)), highlight=False)
    if json_file is not None:
        made.save(json_file)
    if html is not None:
        from thinwire.observe.html.plan_page import write_plan_page

        write_plan_page(made.to_json(), html)
        console.print(f"Page: {html}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The options."""

    target: str | None
    profile_file: Path | None
    probe_file: Path | None
    link: str | None
    hosts: int | None
    backend: str
    cores: int | None
    ranks_per_machine: int | None
    quality: str
    memory_mb: float | None
    compress: list[str]
    experimental: bool

    def __post_init__(self) -> None:
        if self.backend not in ("gloo", "nccl"):
            raise ValueError(f"backend is {self.backend!r}; expected gloo or nccl")
        if (self.target is None) == (self.profile_file is None):
            raise ValueError("give either a target such as train:make or --profile FILE")


def _plan(wanted: _Wanted, save_profile: Path | None, *, with_sweep: bool) -> Plan:
    from thinwire.plan import ModelProfile, choose, profile_model
    from thinwire.plan.roofs import measure_roofs

    budget, probe = _budget(wanted), _probe(wanted)
    cluster = _cluster(wanted, probe)  # what is quick comes first: mistakes are found before anything is measured
    network = _network(wanted, probe, cluster)
    given = _profile_or_target(wanted, cluster)
    codecs = _codecs(wanted, probe)
    profile = given if isinstance(given, ModelProfile) else profile_model(*given, specs=list(codecs))
    if save_profile is not None:
        profile.save(save_profile)
    roofs = measure_roofs() if probe is None else probe.roofs
    facts = _facts(wanted, probe)
    made = choose(profile, network, codecs, cluster, budget=budget, roofs=roofs, facts=facts)
    if not with_sweep:
        return made
    from thinwire.plan.sweep import sweep_rates

    latency_s = _link(wanted, network).latency_s
    rows = sweep_rates(
        profile,
        network,
        codecs,
        cluster,
        latency_s,
        backend=wanted.backend,  # type: ignore[arg-type]  # checked above
        budget=budget,
    )
    return replace(made, sweep=rows)


def _probe(wanted: _Wanted) -> Probe | None:
    """The one given, or the newest; none is needed for a link that is not here."""
    from thinwire.plan import Probe
    from thinwire.plan.store import latest

    if wanted.probe_file is not None:
        return Probe.load(wanted.probe_file)
    found = latest(cache_folder(), wanted.hosts if wanted.link is None else None) or latest(cache_folder())
    if found is None and wanted.link is None:
        raise ValueError("no network is known: run thinwire probe first, or describe one, such as --link 200mbit,1ms")
    return found


def _codecs(wanted: _Wanted, probe: Probe | None) -> dict[str, CodecCost]:
    """Of the candidates: from the probe, or measured now, on this machine."""
    import thinwire.api  # noqa: F401  (fills the registry)
    from thinwire.core import make
    from thinwire.plan import candidate_specs, measure_codec

    specs = [*candidate_specs(experimental=wanted.experimental), *(str(make(spec)) for spec in wanted.compress)]
    known = {} if probe is None else probe.codecs
    return {spec: known[spec] if spec in known else measure_codec(spec) for spec in dict.fromkeys(specs)}


def _profile_or_target(wanted: _Wanted, cluster: Cluster) -> ModelProfile | tuple[nn.Module, Any, Loss]:
    import torch

    from thinwire.plan import ModelProfile
    from thinwire.plan.target import load_target

    if wanted.profile_file is not None:
        return ModelProfile.load(wanted.profile_file)
    assert wanted.target is not None
    torch.set_num_threads(cluster.threads)  # as training will run there
    return load_target(wanted.target)


def _cluster(wanted: _Wanted, probe: Probe | None) -> Cluster:
    """What was probed, unless the options or a link elsewhere say otherwise."""
    import torch

    from thinwire.plan import Cluster

    here = probe.cluster if probe is not None and wanted.link is None else None
    world_size = wanted.hosts or (here.world_size if here else 4)
    return Cluster(
        world_size=world_size,
        ranks_per_machine=wanted.ranks_per_machine or (min(here.ranks_per_machine, world_size) if here else 1),
        cores=wanted.cores or (here.cores if here else os.cpu_count() or 1),
        threads=here.threads if here else torch.get_num_threads(),
    )


def _network(wanted: _Wanted, probe: Probe | None, cluster: Cluster) -> Network:
    from thinwire.plan import network_at, network_of_link, parse_link

    if wanted.link is not None:
        cpu = None if probe is None else probe.network.cpu
        link, backend = parse_link(wanted.link), wanted.backend
        return network_of_link(link, cluster.world_size, backend=backend, cpu=cpu)  # type: ignore[arg-type]
    assert probe is not None
    return network_at(probe.network, cluster.world_size)


def _link(wanted: _Wanted, network: Network) -> Link:
    from thinwire.plan import fit_link, parse_link

    return fit_link(network) if wanted.link is None else parse_link(wanted.link)


def _budget(wanted: _Wanted) -> Budget:
    from thinwire.plan import Budget

    return Budget(
        quality=wanted.quality,  # type: ignore[arg-type]  # Budget checks it
        memory_bytes=None if wanted.memory_mb is None else int(1e6 * wanted.memory_mb),
        experimental=wanted.experimental or bool(wanted.compress),
    )


def _facts(wanted: _Wanted, probe: Probe | None) -> dict[str, str]:
    link = f"{wanted.link} ({wanted.backend}, closed forms)" if wanted.link else "as probed"
    probed = "none" if probe is None else f"{probe.date}, {probe.facts.get('link', '')}"
    return {"model": wanted.target or str(wanted.profile_file), "link": link, "probe": probed}
