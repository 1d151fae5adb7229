import torch; torch.set_num_threads(1)
from collections import Counter
from rlhf_notes.studies.checkable import *
q = make_questions(); train, held = q[:3000], q[3000:3300]; lm = pretrain(train)
for name in ("GRPO", "GSPO"):
    t = CheckableRLHF(lm, train, name).learn(); m = lambda k: sum(r[k] for r in t.rows)/80
    P = [x["prompt"] for x in held]; S = [t.generate(P, seed=s) for s in range(32)]
    tops, rights = [], []
    for i, x in enumerate(held):
        c = Counter(s[i] for s in S)
        if c[x["solution"]] <= 3: tops.append(c.most_common(1)[0][1] / 32)
    print(name, "clip", m("clip_fraction"), "ratio", m("ratio"), "hard", len(tops), sum(tops)/max(1,len(tops)), flush=True)
