"""Whether slow networks are as slow as asked: links by our probe and by iperf3, steps simulated and in namespaces.

    sudo python benchmarks/study/network.py links  # 2 and 4 nodes, 100 Mbit/s to 5 Gbit/s
    sudo python benchmarks/study/network.py steps  # one training: simulated links, namespaces, planned

Every rate is in one direction while the other is as busy, on all links of the ring at once. Needs root, iproute2, and
for ``links`` iperf3. Where ranks have fewer cores than it takes to send so much, the last column says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zeroshard.lab import network
from zeroshard.lab.run_folders import RunResult, read_run
from zeroshard.settings.sizes import parse_bandwidth

BANDWIDTHS = ["100Mbit/s", "1Gbit/s", "5Gbit/s"]
STRATEGIES = ["zero0", "zero3"]  # the least that is sent, and the most
BASE = ["--data", "synthetic", "--eval-interval", "0", "--warmup-steps", "0", "--log-interval", "1000"]
BASE += ["--eval-rows", "1"]
MODEL = ["--model.n-layer", "4", "--model.n-embd", "256", "--seq-len", "128", "--micro-batch-size", "4"]  # 3.2 M


def train(folder: Path, *flags: str) -> RunResult:
    """A run of `zeroshard train`, and what it says of itself."""
    out = folder / f"run-{time.monotonic_ns()}"
    words = [*BASE, "--data.dir", str(folder / "data"), "--out", str(out), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "train", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return read_run(out)


def iperf(nodes: network.NetnsNodes, seconds: float = 3.0) -> list[float]:
    """Bytes a second from each node to the next, all at once."""
    for name in nodes.names:
        subprocess.run(["ip", "netns", "exec", name, "iperf3", "-s", "-1", "-D"], check=True)
    time.sleep(0.5)
    prefix = nodes.address.rpartition(".")[0]

    def send(node: int) -> float:
        to = f"{prefix}.{(node + 1) % len(nodes.names) + 1}"
        words = ["iperf3", "-c", to, "-t", str(seconds), "-O", "1", "-l", "1M", "-J"]
        done = subprocess.run(
            ["ip", "netns", "exec", nodes.names[node], *words], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8

    with ThreadPoolExecutor(len(nodes.names)) as pool:
        return list(pool.map(send, range(len(nodes.names))))


def links(folder: Path, nodes: list[int], bandwidths: list[str]) -> list[dict[str, object]]:
    """Each bandwidth between two and four nodes."""
    rows: list[dict[str, object]] = []
    for num_nodes in nodes:
        for bandwidth in bandwidths:
            asked = parse_bandwidth("bandwidth", bandwidth)
            with network.nodes(num_nodes, 1, asked) as made:
                slowest = min(iperf(made))
            tiny = ["--model.n-layer", "1", "--max-steps", "1", "--nproc", str(num_nodes)]
            link = train(folder, *tiny, "--link.mode", "netns", "--link.bandwidth", bandwidth).link
            assert link is not None
            rows.append(
                {
                    "num_nodes": num_nodes,
                    "asked": bandwidth,
                    "iperf3": slowest / asked,
                    "probe": link.achieved_bytes_per_s / asked,
                    "latency_us": link.achieved_latency_s * 1e6,
                    "why_not_comparable": link.why_not_comparable,
                }
            )
            rates = f"iperf3 {rows[-1]['iperf3']:6.1%}  probe {rows[-1]['probe']:6.1%}"
            latency = f"latency {rows[-1]['latency_us']:5.0f} us"
            print(f"{num_nodes} nodes  asked {bandwidth:>9}  {rates}  {latency}  {link.why_not_comparable}", flush=True)
    return rows


def calibrated(folder: Path, num_ranks: int) -> Path:
    """What this machine can do with as many ranks at once, over the ring that the runs use."""
    path = folder / f"device-{num_ranks}.json"
    if path.exists():
        return path
    words = ["bench", "device", "--nproc", str(num_ranks), "--comms", "ring", "--out", str(path)]
    subprocess.run([sys.executable, "-m", "zeroshard", *words], stdout=subprocess.DEVNULL, check=True)
    return path


def steps(
    folder: Path, devices: Path, nodes: list[int], bandwidths: list[str], strategies: list[str], repeats: int
) -> list[dict[str, object]]:
    """The median step over simulated links and over namespaces, modes taking turns; and what is planned for both."""
    rows = []
    for num_nodes in nodes:
        device = calibrated(devices, num_nodes)
        for strategy in strategies:
            for bandwidth in bandwidths:
                burst = network.shaper_burst(parse_bandwidth("bandwidth", bandwidth))
                found: dict[str, list[float]] = {"simulated": [], "netns": []}
                for _ in range(repeats):
                    for mode, times in found.items():
                        flags = ["--nproc", str(num_nodes), "--strategy", strategy, "--max-steps", "7"]
                        flags += ["--comm", "ring", "--plan.device", str(device)]
                        link = ["--link.mode", mode, "--link.bandwidth", bandwidth, "--link.burst", f"{burst}B"]
                        run = train(folder, *MODEL, *flags, *link)
                        times.append(run.step_s)
                        planned = run.summary["plan"]["step_s"]["predicted"]
                simulated, netns = (sorted(times)[len(times) // 2] for times in found.values())
                rows.append(
                    {
                        "num_nodes": num_nodes,
                        "strategy": strategy,
                        "bandwidth": bandwidth,
                        "simulated_s": found["simulated"],
                        "netns_s": found["netns"],
                        "planned_s": planned,
                        "ratio": simulated / netns,
                    }
                )
                print(
                    f"{num_nodes} nodes  {strategy}  {bandwidth:>9}  simulated {simulated * 1e3:7.1f} ms  "
                    f"netns {netns * 1e3:7.1f} ms  {simulated / netns - 1:+.1%}  planned {planned * 1e3:7.1f} ms  "
                    f"{planned / simulated - 1:+.1%} {planned / netns - 1:+.1%}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("links", "steps"))
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bandwidths", nargs="+", default=BANDWIDTHS)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="of steps")
    parser.add_argument("--repeats", type=int, default=3, help="of each step")
    parser.add_argument("--devices", type=Path, help="calibrations are kept there as device-N.json, and used again")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeroshard-network-") as folder:
        rows = (
            links(Path(folder), args.nodes, args.bandwidths)
            if args.what == "links"
            else steps(
                Path(folder), args.devices or Path(folder), args.nodes, args.bandwidths, args.strategies, args.repeats
            )
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
