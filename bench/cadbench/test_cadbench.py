"""The checker refuses what is wrong, counts what is counted by hand, and the peers do what they did.

Records of the original planner lie beside a checkout (`../shared/data/planner`, or the folder in `CADRE_WORKLOADS`);
without them that part says so and passes.
"""

import copy
import json
import os
import unittest
import zlib
from pathlib import Path

import cases
import lengths
import planners
from check import RefusedError, keys_of, pairs_before, score, whole

ROOT = Path(__file__).resolve().parents[2]


def small(lanes: int = 1, **more: object) -> dict:
    """Documents of 300 and 700 rows over two ranks."""
    return cases.case(lengths.Lengths("small", 500, 2, [300, 700]), lanes=lanes, **more)


class Checker(unittest.TestCase):
    def test_every_wrong_plan_is_refused_by_name(self) -> None:
        case = small(slots=3)
        right = planners.poured(case)
        score(case, right)

        def refused(expected: str, change: object) -> None:
            plan = copy.deepcopy(right)
            change(plan["tasks"])
            with self.assertRaisesRegex(RefusedError, expected):
                score(case, plan)

        refused("computed nowhere", lambda it: it.pop())
        refused("computed twice", lambda it: it.append(it[0]))
        refused("doc is 2", lambda it: it[0].update(doc=2))
        refused("doc is True", lambda it: it[0].update(doc=True))
        refused("slot is -1", lambda it: it[0].update(slot=-1))
        refused("k is", lambda it: it[0].update(k=[1, it[0]["k"][1]]))
        refused("k is", lambda it: it[-1].update(k=[0, it[-1]["k"][1] - 1]))
        refused("q is", lambda it: it[0].update(q=[0, 301]))
        refused("q is", lambda it: it[0].update(q=[5, 5]))
        refused("q is", lambda it: it[0].update(q=[0.0, 300]))
        refused("kv_heads is", lambda it: it[0].update(kv_heads=[0, 9]))
        refused("is no object", lambda it: it.append(None))
        with self.assertRaisesRegex(RefusedError, "no list of tasks"):
            score(case, [])
        with self.assertRaisesRegex(RefusedError, "all heads move together"):
            score(small(lanes=8, slots=3), right)
        with self.assertRaisesRegex(RefusedError, "slot 0 is out"):
            score(cases.without(case, [0]), right)

    def test_a_case_that_cannot_be_is_refused(self) -> None:
        right = small(slots=3)
        whole(right)
        whole(small())

        def refused(expected: str, change: object) -> None:
            case = copy.deepcopy(right)
            change(case)
            with self.assertRaisesRegex(RefusedError, expected):
                whole(case)

        refused("at no rank", lambda it: it["ranks"][1].pop())
        refused("at two", lambda it: it["ranks"][1].append(it["ranks"][0][0]))
        refused("rows of", lambda it: it["ranks"][1].append({"doc": 2, "rows": [0, 1]}))
        refused("home -1", lambda it: it["slots"][0].update(home=-1))
        refused("home 9", lambda it: it["slots"][0].update(home=9))
        refused("weight -1", lambda it: it["slots"][0].update(weight=-1))
        refused("no slot has a weight", lambda it: [slot.update(weight=0) for slot in it["slots"]])
        refused("33 query heads", lambda it: it["heads"].update(query=33))
        refused("0 lanes", lambda it: it.update(lanes=0))
        refused("rates for", lambda it: it.update(rates=[1]))
        refused("as README.md says", lambda it: it.pop("slots"))

    def test_a_program_that_writes_no_plan_is_refused(self) -> None:
        for command in ["true", "sh -c 'echo no > {plan}'"]:
            with self.assertRaisesRegex(RefusedError, "it wrote no plan"):
                planners.program(command)(small())

    def test_scores_are_what_one_counts_by_hand(self) -> None:
        case = small(lanes=8)
        # Rank 0 has document 0 and 200 rows of document 1, rank 1 the other 500.
        plan = {"tasks": [planners.task(case, 0, (0, 300), (0, 8), 0), planners.task(case, 1, (0, 700), (0, 8), 1)]}
        it = score(case, plan)
        query, key, statistic = 32 * 128 * 2, 2 * 8 * 128 * 2, 4 * 32
        self.assertEqual(it.moved, 200 * (query + key))
        out = 200 * (query + key), 200 * (2 * (query + statistic) + key)
        back = 200 * (query + statistic), 200 * (query + 8 * 8 * 128)
        busiest = max(out[0], back[0]) + max(out[1], back[1])
        self.assertAlmostEqual(it.link_ms, busiest / 8 / cases.RATE * 1e3)
        loads = 300 * 301 / 2, 700 * 701 / 2
        self.assertAlmostEqual(it.max_over_mean, loads[1] / (sum(loads) / 2))
        self.assertEqual(it.memory, 700 * (key + 8 * 8 * 128 + 3 * query + 2 * statistic))
        # The last ten rows elsewhere: keys of rank 1 come to slot 0, and the parts of their gradients go back.
        far = {"tasks": [plan["tasks"][0], planners.task(case, 1, (0, 690), (0, 8), 1)]}
        far["tasks"].append(planners.task(case, 1, (690, 700), (0, 8), 0))
        part, rows = 8 * 8 * 128, query + statistic
        forward = 200 * (query + key) + 10 * rows, 10 * query + 500 * key + 200 * rows
        backward = (
            200 * (2 * rows + key) + 10 * query + 500 * part,
            10 * 2 * rows + 500 * key + 200 * (query + part),
        )
        self.assertAlmostEqual(score(case, far).link_ms, (max(forward) + max(backward)) / 8 / cases.RATE * 1e3)
        slow = score(case | {"rates": [cases.RATE, cases.RATE // 4]}, plan)
        self.assertAlmostEqual(slow.link_ms, 4 * it.link_ms)

    def test_masks_are_what_row_by_row_they_keep(self) -> None:
        for mask, kept in [
            ("causal", lambda row, _: (0, row + 1)),
            ("full", lambda _, rows: (0, rows)),
            ("window:5", lambda row, _: (max(0, row - 4), row + 1)),
        ]:
            for rows in (1, 4, 5, 6, 23):
                of_row = [kept(row, rows) for row in range(rows)]
                for start in range(rows):
                    for end in range(start + 1, rows + 1):
                        some = of_row[start:end]
                        hull = (min(it[0] for it in some), max(it[1] for it in some))
                        self.assertEqual(keys_of(mask, rows, (start, end)), hull)
                        pairs = pairs_before(mask, rows, end) - pairs_before(mask, rows, start)
                        self.assertEqual(pairs, sum(b - a for a, b in some))


class Peers(unittest.TestCase):
    def test_every_peer_plans_what_the_checker_takes(self) -> None:
        # The commit's tree decides, so every commit tries new ones.
        seed = int(os.environ.get("CADRE_SEED") or zlib.crc32(os.environ.get("CADRE_TREE_SEED", "no tree").encode()))
        print(f"CADRE_SEED={seed}")
        for of in [*lengths.adversarial(seed), lengths.heavy_tail(seed, 16 * 1024, 4)]:
            if len(of.documents) > 2_000:
                continue
            for case in (
                cases.case(of, layout="head-tail"),
                cases.case(of, slots=3, lanes=1),
                cases.without(cases.case(of, slots=5), [1, 3]),
                cases.case(of, mask="window:100", lanes=1),
            ):
                for planner in (planners.published, planners.poured, planners.at_home):
                    try:
                        plan = planner(case)
                    except planners.NoPlanError:
                        continue
                    score(case, plan)

    def test_the_rebuilt_planner_does_what_the_published_one_did(self) -> None:
        folder = Path(os.environ.get("CADRE_WORKLOADS", ROOT.parent / "shared/data/planner"))
        if not (folder / "distca.json").is_file():
            self.skipTest(f"no records at {folder}")
        records = json.loads((folder / "distca.json").read_text())
        recorded = {it.name: it for it in lengths.recorded(folder / "workloads")}
        some = [it for it in records if it["tolerance"] == 0.05 and it["hidden_q"] == 4096 and it["servers"] <= 32]
        self.assertTrue(some)
        for record in some:
            case = cases.case(recorded[record["workload"]], layout="head-tail")
            it = score(case, planners.published(case))
            bytes_of = record["q_bytes"] + record["kv_bytes"]
            self.assertAlmostEqual(it.moved / bytes_of, 1, delta=0.002, msg=record["workload"])
            self.assertAlmostEqual(it.max_over_mean, record["max_over_mean"], delta=0.001, msg=record["workload"])


class Cases(unittest.TestCase):
    def test_the_same_seed_is_the_same_cases(self) -> None:
        self.assertEqual(list(cases.cases(3, None)), list(cases.cases(3, None)))
        self.assertNotEqual(list(cases.cases(3, None)), list(cases.cases(4, None)))

    def test_documents_fill_all_ranks(self) -> None:
        for it in cases.cases(5, None):
            rows = [0] * len(it["documents"])
            for stretches in it["ranks"]:
                self.assertEqual(sum(b - a for a, b in (of["rows"] for of in stretches)), it["rank_rows"], it["name"])
                for of in stretches:
                    rows[of["doc"]] += of["rows"][1] - of["rows"][0]
            self.assertEqual(rows, [of["rows"] for of in it["documents"]], it["name"])

    def test_outages_have_the_published_statistics(self) -> None:
        trace = cases.outages(1, 400, 34_900)
        self.assertAlmostEqual(len(trace) / 58_400, 1, delta=0.02)
        long = sorted(end - begin for begin, end, _ in trace)
        self.assertAlmostEqual(long[len(long) // 2] / 0.85, 1, delta=0.05)
        self.assertAlmostEqual(long[len(long) * 9 // 10] / 13.7, 1, delta=0.05)


if __name__ == "__main__":
    unittest.main()
