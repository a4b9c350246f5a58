//! `strftime_now` for templates that write today's date. UTC: there is no time zone database here.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A moment, taken apart.
struct Moment {
    year: i64,
    /// 1 to 12.
    month: usize,
    /// 1 to 31.
    day: i64,
    /// 1 to 366.
    day_of_year: i64,
    /// 0 is Sunday.
    weekday: usize,
    /// Of the day.
    second: i64,
}

pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(format, now as i64)
}

/// Days of the Gregorian calendar from a day count (public algorithm: years that begin in March put the leap day last).
fn moment(unix_seconds: i64) -> Moment {
    let (days, second) = (unix_seconds.div_euclid(86_400), unix_seconds.rem_euclid(86_400));
    let from_march = days + 719_468; // days since 0000-03-01
    let era = from_march.div_euclid(146_097);
    let day_of_era = from_march.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_march_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_march_year + 2) / 153;
    let day = day_of_march_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
    Moment {
        year,
        month: month as usize,
        day,
        day_of_year: before + day + i64::from(leap && month > 2),
        weekday: (days + 4).rem_euclid(7) as usize,
        second,
    }
}

/// The directives of C's `strftime` that dates in prompts use; another one is an error by name.
fn strftime(format: &str, unix_seconds: i64) -> Result<String, Error> {
    let now = moment(unix_seconds);
    let (hour, minute, second) = (now.second / 3600, now.second / 60 % 60, now.second % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let month = MONTHS[now.month - 1];
    let weekday = DAYS[now.weekday];
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let (padded, directive) = match chars.next() {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        let number =
            |value: i64, width: usize| if padded { format!("{value:0width$}") } else { value.to_string() };
        out += &match directive {
            Some('Y') => now.year.to_string(),
            Some('y') => number(now.year % 100, 2),
            Some('m') => number(now.month as i64, 2),
            Some('d') => number(now.day, 2),
            Some('e') => format!("{:2}", now.day),
            Some('j') => number(now.day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('f') => "000000".to_owned(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month.to_owned(),
            Some('b' | 'h') => month[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{}-{:02}-{:02}", now.year, now.month, now.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let name = other.map_or("%".to_owned(), |c| format!("%{c}"));
                let message = format!("strftime_now: {name} is not supported: YymdejHIMSfpBbhAaFTZz%");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |t| strftime("%Y-%m-%d %H:%M:%S %a %j", t).unwrap();
        assert_eq!(date(0), "1970-01-01 00:00:00 Thu 001");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00 Tue 060");
        assert_eq!(date(1_735_689_599), "2024-12-31 23:59:59 Tue 366");
        assert_eq!(date(4_107_542_400), "2100-03-01 00:00:00 Mon 060");
        assert_eq!(strftime("%d %b %Y", 1_764_460_800).unwrap(), "30 Nov 2025");
        assert_eq!(strftime("%-d %B, %-I %p 100%%", 1_764_460_800).unwrap(), "30 November, 12 AM 100%");
    }

    #[test]
    fn an_unknown_directive_is_refused_by_name() {
        assert!(strftime("%Q", 0).unwrap_err().to_string().contains("%Q"));
        assert!(strftime("50%", 0).is_err());
    }
}
