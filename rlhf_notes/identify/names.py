"""The meaning of a parameter, by the words of its name; and the kind of a function, by theirs."""

__all__ = ["KINDS", "MASKS", "role_of", "usual_number", "kind_of_roles", "parts_of"]

import re

KINDS = ("policy_loss", "value_loss", "gae", "group_advantage", "kl", "log_prob", "entropy",
         "aggregate", "whiten", "preference_loss")

MASKS = {"mask", "padding", "lengths"}
WORDS = {  # one word -> those that mean the same in other people's code
    "logp": "logp logprob lp logpi loglikelihood logpt",
    "neglogp": "neglogp neglogpac",
    "logits": "logits logit",
    "gauss": "gauss",
    "old": "old behavior behaviour prev previous mu sampled before anchor prox proximal",
    "rollout": "rollout sampling sampler inference generation vllm",
    "ref": "ref reference base sft init initial frozen prior teacher pretrained",
    "new": "new newlogprob newvalue current curr cur policy pi",
    "chosen": "chosen preferred winner winning win better positive pos w yw",
    "rejected": "rejected reject dispreferred loser losing lose worse negative neg yl",
    "mask": "mask valid keep real m",
    "pad": "pad padding padded ignore ignored",
    "advantage": "advantage adv a ahat gae",
    "value": "value v val vpred vf critic vt baselines pred prediction",
    "next": "next last bootstrap final boot tail tp1 prime nextvalue lastvalue",
    "return": "return ret vtarg returned rtg",
    "reward": "reward score rew r rwd outcome",
    "target": "target",
    "terminated": "terminated termination terminal term",
    "truncated": "truncated truncation trunc timeout timelimit",
    "done": "done d fdone end ended over reset cut",
    "start": "start first begin",
    "not": "not non nonterminal notdone continue continuation cont alive",
    "ratio": "ratio rho",
    "entropy": "entropy entropie ent",
    "index": "index uid groupid gid",
    "label": "label y token id action completion response sequence choice",
    "length": "length len seqlen",
    "x": "x loss losse tensor input matrix mat elementwise arr l",
}
MEANS = {word: meaning for meaning, words in WORDS.items() for word in words.split()}
MEANS |= {word + "s": meaning for word, meaning in MEANS.items()}
NOISE = set("b mb batch minibatch flat per the t token tokens seq all my raw level each out "
            "output td".split())
OPTION = set("""clip cliprange coef coeff coefficient eps epsilon range low high norm normalize
    normalise lam lambda lmbda gamma discount beta alpha temperature temp temps mode type kind agg
    aggregation reduction scale weight smoothing max min num n use size factor dim horizon margin
    estimator dual delta tau bonus penalty count threshold limit penalize fn func config cfg args
    whiten shift unbiased std cap floor name logger total rate steps""".split())


def parts_of(name: str) -> list:  # of a parameter: "old_logProbs" -> ["old", "logp"]
    "The words of a name, each under the meaning that it has here."
    name = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_")
    name = re.sub(r"log_?(probabilities|probability|probs?|ps?|pis?|likelihoods?)(?=_|$)", "logp",
                  "v_last" if name == "v_t" else re.sub(r"(^|_)log_?q(?=_|$)", r"\1ref_logp", name))
    name = re.sub(r"(^|_)log_?mu(?=_|$)", r"\1old_logp", name)
    name = re.sub(r"(lp|logp|v|values?)_?0$", r"\1_old", name)
    name = re.sub(r"(discounted|cumulative)_rewards?|rewards?_to_go", "return", name)
    name = re.sub(r"neg(ative)?_?logp(?=_|$)", "neglogp", name)
    name = re.sub(r"(mu|mean)_?(and_)?(sigma|std)(?=_|$)", "gauss", name.removesuffix("_fn_out"))
    name = re.sub(r"(?<=_)l$", "rejected", name)
    name = re.sub(r"log_?(importance_|prob_)?(ratios?|r)(?=_|$)", "log_ratio", name)
    name = re.sub(r"(^|_)(new|old|ref|next|last|not|non)_?(?=(logp|values?|vals?|v|dones?|term"
                  r"|terminals?|logits?|lps?)(_|$))", r"\1\2_", name)
    return [MEANS.get(word, word) for word in name.split("_") if word]


def role_of(name: str) -> str | None:  # of a parameter -> its meaning, None = an option
    "The role of an argument, by the words of its name."
    words = [w.removeprefix("neg") for w in parts_of(name)]
    has = set(words)
    plain = has - NOISE
    side = next((f"{w}_" for w in ("chosen", "rejected") if w in has), "")
    if plain in ({"total", "reward"}, {"lambda", "return"}):
        has, plain = has - OPTION, plain - OPTION
    if "mask" in has and has & {"done", "terminated"}: return _ends(has)
    if "mask" in has: return side + ("padding" if "pad" in has and "not" not in has else "mask")
    if "ratio" in has and not has & OPTION: return "log_ratio" if "log" in has else "ratio"
    if name in ("weight", "weights"): return "weight"
    if plain == {"ppo", "kl"}: return "log_ratio"  # of the old policy over the new one
    if has & OPTION and not has & {"logp", "logits"}: return None
    if "pad" in has: return None if has & {"id", "label", "index"} else "padding"
    if {"chosen", "rejected"} & plain and (plain - {"chosen", "rejected"} or len(name) > 2):
        side = "chosen" if "chosen" in has else "rejected"
        if "logp" in has or not has & {"length", "label"}:
            return f"{side}_ref" if "ref" in has else side
    if has & {"logits", "gauss"}:
        return next((f"logits_{w}" for w in ("ref", "old") if w in has), "logits")
    if "logp" in has:
        return next((f"logp_{w}" for w in ("rollout", "ref", "old") if w in has), "logp")
    if "value" in has and has & {"done", "terminated"}: return "next_value"
    if has & {"done", "terminated", "truncated", "not", "start"}: return _ends(has)
    if "advantage" in has and "return" not in has: return "advantage"
    if "entropy" in has: return "entropy"
    if "value" in has and name.endswith("_"): return "next_value"  # V(s'), as in tianshou
    if "value" in has or plain == {"next"}: return _values(has)
    if "return" in has: return "returns"
    if "reward" in has: return "next_value" if "last" in name else "rewards"
    if plain == {"target"}: return "labels"
    if "length" in has: return side + "lengths"
    if "index" in has or "group" in has and has & {"ids", "label", "idx"}: return "index"
    if "x" in has and not ("input" in name and "label" in has): return "x"
    if "label" in plain or has <= MEANS.keys() & NOISE | {"label"}: return "labels"
    return None


def _ends(has):
    end = next((w for w in ("start", "terminated", "truncated") if w in has), "done")
    if "not" in has: return "not_done_last" if "next" in has else "not_done"
    return "done_last" if "next" in has and end != "start" else end.replace("start", "starts")


def _values(has):
    if "next" in has: return "next_value"
    if "old" in has: return "value_old"
    return "returns" if has & {"target", "return"} else "value"


NUMBERS = [  # (what an option without default gets, the name has this), the first that fits
    (True, r"^(use|is|do|with|should|enable)_|^norm(ali[sz]e)?_?(adv|rew|by|std)|clip_\w*_?loss$"),
    (3.0, r"dual|clip_?(?:ratio_?)?c$|eps(?:ilon)?_?c$|delta"),
    (0.2, r"clip|eps\w*_(?:low|high|hi|lo|lower|upper)|^eps_?(?:l|h)$"),
    (0.93, r"gamma|discount"),
    (0.87, r"^lam|lambda|lmbda|_lam"),
    (0.1, r"beta|coef|weight|eta"),
    (1.3, r"temp"),
    (0.0, r"smooth|margin"),
    (16, r"max_?(?:len|completion|response|tokens|seq)|length|norm\w*er|horizon|gen_?len"),
    (4, r"^[gkn]$|_[gkn]$|group|num|samples_|_samples|n_resp|rollouts|repeat|size|per_?prompt"),
    (1e-6, r"eps"),
    (1.0, r"scale|factor|alpha|tau"),
]

GROUP_NAME = re.compile(  # of the number of responses to a prompt
    r"^[gkn]$|(?<!top)_[gkn]$|group|grpo_size|per_?(prompt|question)|samples_?per|repeat|"
    r"^n(um(ber)?)?_?(of_)?(gen|samp|resp|roll|compl|answ|outp|return|seq)")


def usual_number(name: str) -> float | bool | None:  # of a parameter without default
    "A number that an option of this name may have; None if the name says nothing."
    name = name.lower()
    return next((number for number, has in NUMBERS if re.search(has, name)), None)


def kind_of_roles(roles: set, required: set) -> str | None:  # of all parameters, without default
    'The kind; "x" for a reduction or whitening, None where the names do not tell.'
    if {"chosen", "rejected"} <= roles: return "preference_loss"
    if "advantage" in roles and roles & {"logp", "ratio", "log_ratio"}: return "policy_loss"
    if {"advantage", "logits", "labels"} <= roles: return "policy_loss"
    if {"rewards", "logits", "logits_old", "labels"} <= roles: return "policy_loss"
    if "rewards" in roles and roles & {"value", "next_value"}: return "gae"
    if {"rewards", "logp"} <= roles and not roles & {"logp_ref", "advantage"}:
        return "policy_loss"
    if "logits" in roles: return "log_prob" if "labels" in roles else "entropy"
    if "logp" in roles and roles & {"logp_ref", "logp_old"} or "log_ratio" in roles: return "kl"
    if {"value", "returns"} <= roles: return "value_loss"
    if "rewards" in roles and roles & {"done", "terminated", "truncated", "not_done", "starts"}:
        return "gae"
    if "rewards" in roles and ("mask" not in required or roles & {"index", "group"}):
        return "group_advantage"
    return "x" if roles & {"x", "value", "advantage", "rewards", "returns"} else None
