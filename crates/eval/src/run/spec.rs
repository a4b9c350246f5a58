//! What a run is asked to do, and the plan that follows: cells, tokens, money, and what it will be able to tell apart.

use serde::{Deserialize, Serialize};

use crate::EvalError;
use crate::endpoint::Protocol;
use crate::item::{Cell, View};
use crate::load::Load;
use crate::stats::cost::{self, Prices, Work};
use crate::stats::proportion::detectable_difference;
use crate::stats::serving::Goals;
use crate::task::{Kit, Task};

/// What is said about caches; the measured share is held against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheState {
    /// Every prompt begins with a salt of its own.
    Cold,
    /// Prompts as they are, asked once before they are measured by whoever says so.
    Warm,
    /// Prompts as they are.
    Mixed,
}

impl CacheState {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            CacheState::Cold => "cold",
            CacheState::Warm => "warm",
            CacheState::Mixed => "mixed",
        }
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Tasks with their options.
    pub tasks: Vec<String>,
    /// Lengths in tokens, prompt and answer.
    pub lengths: Vec<usize>,
    /// Items of each task and length.
    pub samples: u32,
    /// How much of the context is shown.
    pub views: Vec<View>,
    /// Seed of the pack.
    pub seed: u64,
    /// How prompts are spoken.
    pub protocol: Protocol,
    /// Tokens of each length left to the template and the salt, so that the whole fits.
    pub reserve_tokens: usize,
    /// Answer tokens instead of the task's own.
    pub answer_tokens: Option<usize>,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Go on past the model's end token.
    pub ignore_eos: bool,
    /// Load.
    pub load: Load,
    /// Cache.
    pub cache: CacheState,
    /// Tries after a busy or broken answer (closed load only).
    pub retries: u32,
    /// Make the read-proof.
    pub read_proof: bool,
    /// Haystack, by name and hash.
    pub haystack: String,
    /// Counter, by name.
    pub counter: String,
    /// Version of the generators.
    pub generator: u32,
    /// Limits of goodput.
    pub goals: Goals,
    /// Prices.
    pub prices: Prices,
}

impl Spec {
    /// Names of the fields that are not the same.
    pub fn differing(&self, other: &Spec) -> Vec<String> {
        let map = |s: &Spec| serde_json::to_value(s).unwrap_or_default();
        let (a, b) = (map(self), map(other));
        let names = a.as_object().map(|m| m.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
        names.into_iter().filter(|n| a[n] != b[n]).collect()
    }

    /// The length that an item is built for.
    pub fn built_tokens(&self, length_tokens: usize) -> usize {
        length_tokens.saturating_sub(self.reserve_tokens)
    }

    /// Hash of what decides the prompts.
    pub fn pack(&self) -> String {
        let decides = serde_json::json!([
            self.generator,
            self.seed,
            self.tasks,
            self.lengths,
            self.samples,
            self.views,
            self.reserve_tokens,
            self.haystack,
            self.counter,
        ]);
        blake3::hash(decides.to_string().as_bytes()).to_hex()[..16].to_owned()
    }

    /// Every question, so ordered that a run which is stopped has asked of all tasks and lengths alike.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for index in 0..self.samples {
            for task in &self.tasks {
                for &length_tokens in &self.lengths {
                    for &view in &self.views {
                        cells.push(Cell { task: task.clone(), length_tokens, index, view });
                    }
                }
            }
        }
        cells
    }
}

/// What a run will take and what it will be able to tell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Items.
    pub items: usize,
    /// Prompt tokens of all items (first requests).
    pub prompt_tokens: u64,
    /// Answer tokens at most.
    pub answer_tokens: u64,
    /// Tokens of the read-proof's probes at least.
    pub proof_tokens: u64,
    /// Money for the tokens, where token prices are given.
    pub token_cost: Option<f64>,
    /// Smallest difference between two such runs that a 5 % test finds with 80 % power near a score of 85.6, by length.
    pub detectable: Vec<(usize, f64)>,
}

/// Makes the plan and builds one item of every kind, so that what cannot be asked is known before anything is sent.
///
/// Errors: a length at which a task has no prompt, one that the endpoint's context does not hold, an empty or doubled list.
pub fn plan(
    spec: &Spec,
    tasks: &[&'static dyn Task],
    kit: &Kit<'_>,
    max_model_len: Option<usize>,
) -> Result<Plan, EvalError> {
    check(spec, max_model_len)?;
    let (mut prompt_tokens, mut answer_tokens) = (0u64, 0u64);
    for (name, task) in spec.tasks.iter().zip(tasks) {
        for &length in &spec.lengths {
            for &view in &spec.views {
                let cell =
                    Cell { task: name.clone(), length_tokens: spec.built_tokens(length), index: 0, view };
                let item = task.item(kit, &cell)?;
                let n = u64::from(spec.samples);
                prompt_tokens += n * (item.prompt_tokens + spec.reserve_tokens) as u64;
                answer_tokens += n * spec.answer_tokens.unwrap_or(item.answer_tokens) as u64;
            }
        }
    }
    let work =
        Work { input_tokens: prompt_tokens as f64, output_tokens: answer_tokens as f64, ..Work::default() };
    let token_cost = cost::costs(&Prices { per_hour: None, ..spec.prices }, &work).first().map(|c| c.total);
    let per_length = spec.samples as usize * spec.tasks.len();
    let longest = spec.lengths.iter().max().copied().unwrap_or(0) as u64;
    Ok(Plan {
        items: spec.cells().len(),
        prompt_tokens,
        answer_tokens,
        proof_tokens: if spec.read_proof { longest * super::proof::DEPTHS.len() as u64 } else { 0 },
        token_cost,
        detectable: spec.lengths.iter().map(|&l| (l, detectable_difference(0.856, per_length))).collect(),
    })
}

fn check(spec: &Spec, max_model_len: Option<usize>) -> Result<(), EvalError> {
    let listed = |field: &str, n: usize, distinct: usize| {
        if n == 0 || n != distinct {
            return Err(EvalError::bad(
                field,
                format!("{n} of which {distinct} are distinct"),
                "a list without doubles",
            ));
        }
        Ok(())
    };
    let distinct = |mut v: Vec<String>| {
        v.sort();
        v.dedup();
        v.len()
    };
    listed("tasks", spec.tasks.len(), distinct(spec.tasks.clone()))?;
    listed("lengths", spec.lengths.len(), distinct(spec.lengths.iter().map(usize::to_string).collect()))?;
    listed("views", spec.views.len(), distinct(spec.views.iter().map(|v| format!("{v:?}")).collect()))?;
    if spec.samples == 0 {
        return Err(EvalError::bad("samples", 0, "at least 1"));
    }
    if let Load::Closed { concurrency: n } | Load::Open { most_in_flight: n, .. } = spec.load
        && !(1..=4096).contains(&n)
    {
        return Err(EvalError::bad("concurrency", n, "1 to 4096"));
    }
    if let Load::Open { rate, .. } = spec.load
        && !(rate > 0.0 && rate <= 1e5)
    {
        return Err(EvalError::bad("rate", rate, "requests a second above 0, at most 100000"));
    }
    for &length in &spec.lengths {
        if length <= spec.reserve_tokens {
            return Err(EvalError::bad(
                "lengths",
                length,
                format!("above the {} reserved tokens", spec.reserve_tokens),
            ));
        }
        if let Some(limit) = max_model_len.filter(|&limit| length > limit) {
            return Err(EvalError::bad(
                "lengths",
                length,
                format!("at most {limit}, which the endpoint's context holds"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) fn example() -> Spec {
    Spec {
        tasks: vec!["probe".into()],
        lengths: vec![400, 800],
        samples: 4,
        views: vec![View::Full],
        seed: 7,
        protocol: Protocol::Chat,
        reserve_tokens: 64,
        answer_tokens: None,
        stop: Vec::new(),
        ignore_eos: false,
        load: Load::Closed { concurrency: 1 },
        cache: CacheState::Cold,
        retries: 0,
        read_proof: false,
        haystack: "numbers".into(),
        counter: "bytes".into(),
        generator: 1,
        goals: Goals::default(),
        prices: Prices::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_run_has_asked_of_every_length() {
        let cells = example().cells();
        assert_eq!(cells.len(), 8);
        assert!(cells[0].length_tokens != cells[1].length_tokens && cells[0].index == cells[1].index);
    }

    #[test]
    fn lengths_beyond_the_context_are_refused_in_the_plan() {
        let e = check(&example(), Some(500)).unwrap_err().to_string();
        assert!(e.contains("800") && e.contains("500"), "{e}");
        let doubled = Spec { lengths: vec![400, 400], ..example() };
        assert!(check(&doubled, None).is_err());
        let open = Load::Open { rate: 0.0, arrivals: crate::load::Arrivals::Poisson, most_in_flight: 4 };
        assert!(check(&Spec { load: open, ..example() }, None).is_err());
    }

    #[test]
    fn the_pack_is_named_by_what_decides_the_prompts() {
        let a = example();
        assert_eq!(a.pack(), Spec { retries: 3, ..example() }.pack());
        for other in [Spec { seed: 8, ..example() }, Spec { lengths: vec![400], ..example() }] {
            assert_ne!(a.pack(), other.pack());
        }
    }
}
