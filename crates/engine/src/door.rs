//! What an engine accepts: every request is judged here, by pure rules, before anything is queued or allocated for it.

use suanpan_base::BadArgument;

use crate::params::MAX_PROMPT_LOGPROB_ENTRIES;
use crate::request::Request;

const OP: &str = "request";

/// The limits of one engine, cheap to copy to wherever requests come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Door {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Prompt and output tokens of one request, in all.
    pub max_model_len: usize,
}

impl Door {
    /// Checks a request and returns its prompt and output tokens at most, in all. Refusals give the true limit and both parts.
    pub fn check(&self, request: &Request) -> Result<usize, BadArgument> {
        let Request { prompt, params, .. } = request;
        params.validate(self.vocab_size)?;
        if prompt.is_empty() {
            return Err(BadArgument::new(OP, "prompt", "0 tokens", "at least 1 token"));
        }
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= self.vocab_size) {
            let supported = format!("token ids below the vocabulary size {}", self.vocab_size);
            return Err(BadArgument::new(OP, "prompt", format!("token id {id}"), supported));
        }
        let max_total = self.length(prompt.len(), params.max_tokens, params.min_tokens)?;
        if params
            .prompt_logprobs
            .is_some_and(|n| prompt.len().saturating_mul(n + 1) > MAX_PROMPT_LOGPROB_ENTRIES)
        {
            let asked = format!(
                "{} alternatives for {} tokens",
                params.prompt_logprobs.unwrap_or_default(),
                prompt.len()
            );
            let supported = format!("at most {MAX_PROMPT_LOGPROB_ENTRIES} log-probabilities in all");
            return Err(BadArgument::new(OP, "prompt_logprobs", asked, supported));
        }
        Ok(max_total)
    }

    fn length(
        &self,
        prompt: usize,
        max_tokens: Option<usize>,
        min_tokens: usize,
    ) -> Result<usize, BadArgument> {
        let limit = self.max_model_len;
        let room = limit.saturating_sub(prompt);
        if prompt > limit || (room == 0 && max_tokens != Some(0)) {
            let supported = format!("at most {limit} tokens for prompt and output, one of them output");
            return Err(BadArgument::new(OP, "prompt", format!("{prompt} tokens"), supported));
        }
        let outputs = max_tokens.unwrap_or(room);
        if outputs > room {
            let supported = format!("at most {limit} tokens in all");
            return Err(BadArgument::new(
                OP,
                "max_tokens",
                format!("{prompt} prompt + {outputs} output tokens"),
                supported,
            ));
        }
        if min_tokens > outputs {
            let supported = format!("at most {outputs}, the output tokens that fit");
            return Err(BadArgument::new(OP, "min_tokens", min_tokens, supported));
        }
        Ok(prompt + outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::SamplingParams;

    const DOOR: Door = Door { vocab_size: 100, max_model_len: 2048 };

    fn ask(prompt: usize, params: SamplingParams) -> Result<usize, BadArgument> {
        DOOR.check(&Request { prompt: vec![1; prompt], params, ..Request::default() })
    }

    fn tokens(max_tokens: Option<usize>) -> SamplingParams {
        SamplingParams { max_tokens, ..SamplingParams::default() }
    }

    #[test]
    fn length_errors_give_the_true_limit_and_both_parts() {
        let over = ask(8, tokens(Some(2045))).unwrap_err();
        assert_eq!(over.field, "max_tokens");
        assert!(over.asked.contains("8 prompt + 2045 output") && over.supported.contains("2048"), "{over}");
        for prompt in [2048, 3000] {
            let e = ask(prompt, tokens(None)).unwrap_err();
            assert_eq!(e.field, "prompt");
            assert!(e.asked.contains(&prompt.to_string()) && e.supported.contains("2048"), "{e}");
        }
        assert_eq!(ask(2047, tokens(None)), Ok(2048));
        assert_eq!(ask(8, tokens(Some(2040))), Ok(2048));
        assert_eq!(ask(8, tokens(Some(usize::MAX))).unwrap_err().field, "max_tokens");
        assert_eq!(
            ask(2000, SamplingParams { min_tokens: 49, ..tokens(None) }).unwrap_err().field,
            "min_tokens"
        );
    }

    #[test]
    fn a_full_context_can_be_scored() {
        let scoring = SamplingParams { prompt_logprobs: Some(0), ..tokens(Some(0)) };
        assert_eq!(ask(2048, scoring.clone()), Ok(2048));
        assert_eq!(ask(2049, scoring).unwrap_err().field, "prompt");
    }

    #[test]
    fn empty_prompts_and_ids_outside_the_vocabulary_are_refused() {
        assert_eq!(ask(0, tokens(None)).unwrap_err().field, "prompt");
        let request = Request { prompt: vec![1, 100], ..Request::default() };
        assert!(DOOR.check(&request).unwrap_err().asked.contains("100"));
    }

    #[test]
    fn prompt_logprobs_cannot_ask_for_unbounded_memory() {
        let door = Door { max_model_len: 1 << 20, ..DOOR };
        let params = SamplingParams { prompt_logprobs: Some(20), ..tokens(Some(1)) };
        let ask =
            |n| door.check(&Request { prompt: vec![1; n], params: params.clone(), ..Request::default() });
        assert_eq!(ask(100_000).unwrap_err().field, "prompt_logprobs");
        assert_eq!(ask(40_000), Ok(40_001));
    }
}
