"""Who is named where one thing ends several: kernels behind one that hangs, what ends dQ, processes whose GPUs differ.

In: the pack of rehearsal.py. Out: unittest's verdict.
"""

import rehearsal
from rehearsal import BAD, GOOD, LONG, load_tests  # noqa: F401


class Blame(rehearsal.Play):
    def test_processes_have_different_gpus(self) -> None:
        came = self.play("--only", "smoke,decisions", OWN_GPU="1")
        summary = self.summary(came)
        self.assertEqual(came.code, 1)
        self.assertRegex(summary, r"FAILED the GPU: forms has GPU GPU-\S+, the first stage had GPU-\S+: their numbers")

    @LONG
    def test_dq_in_bf16_is_wrong(self) -> None:
        ends = "cadre_finish_dq"
        came = self.play("--only", "smoke,diagnosis", kernels=f"{BAD},finish_dq d64 in bf16", WRONG=ends)
        self.assertEqual(came.content["kernels"], {BAD: "right", ends: "wrong"})
        summary = self.summary(came)
        self.assertRegex(summary, r"FAILED finish_dq d64 in bf16: dQ, \d")
        self.assertRegex(summary, rf"DIAGNOSIS {ends}: wrong in bits of dQ, dQ; first dQ:\d+:\d+:\d+: ")
        self.assertRegex(summary, r"the emulated GPU has \S+ there: the kernel's source is right as we read")

    def test_a_kernel_hangs_that_others_come_behind(self) -> None:
        kernels = f"{BAD},finish_dq d64 in bf16,{GOOD}"
        came = self.play("--only", "smoke,diagnosis", kernels=kernels, HANG=BAD)
        self.assertEqual(came.content["kernels"], {GOOD: "right", BAD: "hang"})
        summary = self.summary(came)
        self.assertIn(f"not run: smoke: finish_dq d64 in bf16: {BAD} hangs or faults", summary)
        self.assertEqual(summary.count("FAILED part smoke"), 1)
