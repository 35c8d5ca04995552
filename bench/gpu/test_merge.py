"""What the merge into the tree makes of runs in any order, of one that is merged twice, and of calibrations; whether
the planner's compiler takes what it writes. Needs no GPU.

In: rows and calibrations, made here; the planner's structs as they are in the tree. Out: unittest's verdict.
"""

import contextlib
import copy
import io
import json
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import merge
from test_judged import RIGHT, timed

KERNELS = {f"cadre_{it}_{dim}": "right" for it in ("forward", "backward") for dim in (64, 128)}
COPIES = {f"cadre_copy_rows_{it}": "right" for it in (16, 4)}
H100, H200 = "gpu-nvidia-h100-80gb-hbm3", "gpu-nvidia-h200"
TABLE = {
    "head_dim": 128,
    "direction": "forward",
    "kept": "causal",
    "rows": [1, 2],
    "keys": [0, 5],
    "picoseconds": [[1, 2], [3, 4_000_000]],
}
LINK = {"distance": "node", "rate": 3, "latency": 4}


def run(commit: str, date: str, seconds: float, *cases: str, **more: object) -> dict:
    """What a run brings back that has timed `cases`."""
    row = {"direction": "backward", "kernel": "Cadre", "l2": "warm", "seconds": seconds, "spread": 0.01, "tflops": 1.0}
    row["provenance"] = {"commit": commit, "device": "H200", "date": date}
    rate = {"case": "one piece", "gigabytes": 1 / seconds, "ratio": 0.5, "provenance": row["provenance"]}
    content = {"commit": commit, "date": date, "forms": [], "checks": [], "kernels": KERNELS | COPIES, "rates": [rate]}
    return content | {"speeds": [row | {"case": f"64:8 d128, {it}"} for it in cases]} | more


def calibration(processor: str, **more: object) -> str:
    known = {"version": 1, "processor": processor, "source": "measured", "task_nanoseconds": 8, "linear_operations": 9}
    return json.dumps(known | {"kernels": [TABLE], "links": [LINK]} | more)


class OrderTest(unittest.TestCase):
    OLD = ("aaa", "2026-11-01 09:00 UTC", 2.0, "causal 16K x1", "causal 32K x1")
    NEW = ("bbb", "2026-11-02 09:00 UTC", 1.0, "causal 16K x1")

    def test_runs_may_be_merged_in_any_order_and_more_than_once(self) -> None:
        right = merge.merged(merge.merged({}, run(*self.OLD)), run(*self.NEW))
        self.assertEqual((right["newest"], len(right["rows"])), ("bbb", 2))
        for words in ((self.NEW, self.OLD), (self.OLD, self.NEW, self.OLD), (self.NEW, self.NEW, self.OLD)):
            store: dict = {}
            for it in words:
                store = merge.merged(store, run(*it))
            self.assertEqual(merge.render(store), merge.render(right), words)
        self.assertRegex(merge.render(right), r"32K x1 .* commit `aaa` \|")

    def test_what_the_newest_run_decides_is_on_the_page(self) -> None:
        form = {
            "direction": "backward",
            "l2": "warm",
            "blocks": 132,
            "spread": 0.001,
            "tflops": 1.0,
            "form": "as built",
        }
        form |= {"case": "64:8 d128, causal 16384 rows", "provenance": {"commit": "bbb", "device": "H200"}}
        forms = [form | {"order": "fixed", "seconds": 1.2}, form | {"order": "arrival", "seconds": 1.0}]
        gain = "two trainers in place: 1.000 s a step, local 1.200: gain 1.20 (medians of 8 steps, spread 1.0%)"
        store = merge.merged({}, run(*self.NEW, forms=forms, notes=[gain]))
        store = merge.merged(store, run(*self.OLD, notes=["an older one"]))
        page = merge.into_page(f"{merge.BEGIN}{merge.END}", merge.render(store))
        told = " ".join(page[page.index("What the run of commit `bbb` decides") :].split())
        self.assertIn("- dQ in one order instead of that of arrival: 64:8 d128, causal 16384 rows: 1200.000 ms", told)
        self.assertRegex(told, r"1\.200 times: slower - two trainers in place: .* gain 1\.20")
        self.assertNotIn("an older one", page)
        self.assertLessEqual(max(len(it) for it in page.splitlines() if not it.startswith("|")), 100)

    def test_a_merge_changes_neither_the_record_nor_the_run(self) -> None:
        past, content = merge.merged({}, run(*self.OLD)), run(*self.NEW)
        kept = copy.deepcopy((past, content))
        merge.merged(past, content)
        self.assertEqual((past, content), kept)


class CalibrationTest(unittest.TestCase):
    def merged(self, store: dict, processor: str, date: str = "2026-11-02", **more: object) -> dict:
        self.printed = io.StringIO()
        with contextlib.redirect_stdout(self.printed):
            return merge.with_calibration(store, run("aaa", date, 1.0) | more, calibration(processor))

    def test_those_of_an_h100_and_an_h200_ship_side_by_side(self) -> None:
        store = self.merged(self.merged({}, H100), H200)
        self.assertEqual(
            {gpu: it["processor"] for gpu, it in store["calibrations"].items()}, {"h100": H100, "h200": H200}
        )
        self.assertIn("commit aaa, 2026-11-02", store["calibrations"]["h100"]["source"])

    def test_those_of_others_are_recorded_and_not_shipped(self) -> None:
        for name in ("gh200-480gb", "h200-mig-1g.18gb", "h200-nvl", "h100-pcie", "a100-sxm4-80gb", "h200-portable"):
            processor = f"gpu-nvidia-{name}"
            store = self.merged({}, processor)
            self.assertEqual(list(store), ["calibrations_of_others"], processor)
            self.assertIn("is recorded and not shipped", self.printed.getvalue())

    def test_an_older_one_takes_the_place_of_no_newer_one(self) -> None:
        store = self.merged({}, H100, "2026-11-02")
        self.assertEqual(self.merged(store, H100, "2026-11-01"), store)
        self.assertIn("stays that of 2026-11-02, which is newer", self.printed.getvalue())
        self.assertIn("2026-11-03", self.merged(store, H100, "2026-11-03")["calibrations"]["h100"]["source"])

    def test_one_of_another_gpu_than_the_run_is_refused(self) -> None:
        for kernels in ("", "-portable"):
            self.merged({}, H100 + kernels, device="NVIDIA H100 80GB HBM3")
        with self.assertRaisesRegex(merge.RefusedError, "is of gpu-nvidia-h200, the run was on NVIDIA H100 80GB HBM3"):
            self.merged({}, H200, device="NVIDIA H100 80GB HBM3")

    def test_one_that_is_not_whole_is_refused(self) -> None:
        content = run("aaa", "2026-11-02", 1.0)
        with self.assertRaisesRegex(merge.RefusedError, "calibration.json is not whole"):
            merge.with_calibration({}, content, calibration(H200)[:-9])
        with self.assertRaisesRegex(merge.RefusedError, "calibration.json is partial: 3 of 8 rows: remove it"):
            merge.with_calibration({}, content, calibration(H200, partial="3 of 8 rows"))


class TakenTest(unittest.TestCase):
    def content(self, **more: object) -> dict:
        row = timed("", 1.0, kernel="Cadre", ratio=1.5, ratio_peer="FA3", case="64:8 d128, causal 16K x1")
        peer = row | {"kernel": "cuDNN", "seconds": 2.0}
        return {"commit": "aaa", "speeds": [row, peer], "forms": [], "checks": [], "kernels": dict(RIGHT), **more}

    def test_a_pack_that_is_not_whole_gives_nothing(self) -> None:
        pack = {"check": "pack", "what": "forms/x has other bytes: copy the pack again", "passed": False}
        with self.assertRaisesRegex(merge.RefusedError, "its pack was not whole: forms/x has other bytes"):
            merge.merged({}, self.content(checks=[pack]))

    def test_rows_are_taken_of_kernels_that_are_right(self) -> None:
        for kernels in ({}, RIGHT | {"cadre_forward_128": "wrong"}, {"cadre_backward_128": "right"}):
            self.assertEqual(merge.merged({}, self.content(kernels=kernels))["rows"], [], kernels)
        rate = {"case": "one piece", "gigabytes": 1.0, "ratio": 0.5, "provenance": {"commit": "aaa"}}
        self.assertEqual(merge.merged({}, self.content(rates=[rate]))["rates"], [])
        content = self.content()
        content["speeds"].append(content["speeds"][0] | {"kernel": "Cadre softcap"})
        self.assertEqual({it["kernel"] for it in merge.merged({}, content)["rows"]}, {"Cadre", "cuDNN"})

    def test_a_calibration_needs_kernels_that_are_right(self) -> None:
        tables = [{"head_dim": 128}]
        text = json.dumps({"processor": "gpu-nvidia-h200", "source": "measured", "kernels": tables})
        self.assertIn("h200", merge.with_calibration({}, self.content(), text)["calibrations"])
        for kernels in ({}, RIGHT | {"cadre_backward_128": "hang"}):
            with self.assertRaisesRegex(merge.RefusedError, r"cadre_\w+_128 is not known to be right"):
                merge.with_calibration({}, self.content(kernels=kernels), text)

    def test_a_bar_names_the_peer_that_it_is_against(self) -> None:
        content = self.content()
        content["speeds"][0] |= {"case": "64:8 d128, tasks pretrain, slot 0", "ratio_peer": "FA2 varlen"}
        text = merge.render(merge.merged({}, content))
        self.assertIn("| 1.50 against FA2 varlen |", next(it for it in text.splitlines() if "tasks as planned" in it))

    def test_times_with_the_hosts_work_are_in_no_bar_and_marked(self) -> None:
        content = self.content()
        for it in content["speeds"]:
            it["without_host"] = False
        text = merge.render(merge.merged({}, content))
        self.assertRegex(text, r"causal 16K x1 \| backward \| Cadre .*\| with the host's work \|")
        self.assertIn("| not measured / not measured |", next(it for it in text.splitlines() if "dense causal" in it))
        text = merge.render(merge.merged({}, self.content()))
        self.assertIn("| not measured / 2.00 |", next(it for it in text.splitlines() if "dense causal" in it))

    def test_a_run_that_was_stopped_is_marked(self) -> None:
        text = merge.render(merge.merged({}, self.content(stopped="stopped by SIGTERM")))
        self.assertRegex(text, r"causal 16K x1 .*\| of a run that was stopped \|")


class CompiledTest(unittest.TestCase):
    def test_the_planner_takes_what_is_written(self) -> None:
        profile = merge.ROOT / merge.TABLES.parent
        compiler = shutil.which("rustc")
        if compiler is None or not profile.exists():
            self.skipTest("there is no rustc, or no planner")
        # The planner's types as they are, without what they derive.
        sources = "".join((profile / it).read_text() for it in ("mod.rs", "places.rs", "table.rs"))
        structs = ("Profile", "Site", "LinkTimes", "Table")
        types = [re.search(rf"pub struct {it} {{.*?\n}}", sources, re.DOTALL)[0] for it in structs]
        types += [re.search(rf"pub enum {it} {{.*?\n}}", sources, re.DOTALL)[0] for it in ("Direction", "Kept")]
        types = [re.sub(r"#\[.*?\]\n", "", it) for it in types]
        whole = json.loads(calibration('gpu-"x"'))
        empty = whole | {"links": []}
        for calibrations in ({}, {"h100": whole}, {"h100": empty, "h200": whole}):
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "lib.rs"
                own = f"mod measured {{\n{merge.tables(calibrations).replace('//!', '//')}}}"
                use = "pub fn profile(gpu: &str) -> Option<Profile> { measured::profile(gpu) }"
                source.write_text("\n".join(["const VERSION: u32 = 1;", *types, own, use]))
                command = [
                    compiler,
                    "--edition=2024",
                    "--crate-type=lib",
                    "--emit=metadata",
                    "-Dwarnings",
                    "-Adead_code",
                ]
                done = subprocess.run(
                    [*command, "--out-dir", folder, source], capture_output=True, text=True, check=False, cwd=folder
                )
                self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
